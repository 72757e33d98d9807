#pragma once

/* kernels/model/weights.h - a model's matrices as a table of operations wants them.
 *
 * Made once at start and read only afterwards. Packed matrices lie in one arena in the order they
 * are used, which is one copy for all workers of the host where there is a place for it
 * (kernels/packs); a table that packs nothing reads the model file's mapping, which must outlive
 * this. A
 * tensor-parallel rank has its own rows of the matrices whose results are its own (query, key,
 * value, gate, up, head) and its own columns of those whose results are summed (output, down).
 */

#include "kernels/big_memory.h"
#include "kernels/model/split.h"
#include "kernels/ops.h"
#include "kernels/packs.h"

typedef struct kern_layer_weights {
    const float *attention_norm, *ffn_norm; /* [hidden] */
    kern_matrix query, key, value, output;
    kern_matrix gate, up, down;
} kern_layer_weights;

typedef struct kern_weights {
    const pd_model_shape *shape; /* the file's */
    const pd_tensor *embedding;  /* likewise, rows of it are looked up */
    const float *output_norm;
    kern_matrix head;
    kern_layer_weights *layers; /* [shape->layers] */
    kern_memory memory;
} kern_weights;

/* What the arena's layout is, beside what is seen of it at start (the order and sizes of its parts,
 * and what the table's pack makes of a few small matrices): raise it when a part's content changes
 * in a way that none of those shows. */
#define KERN_WEIGHTS_VERSION 1
/* An arena below this is not worth a file. */
#define KERN_WEIGHTS_SHARED_MIN ((size_t)4 << 20)

/* place: of the packed weights; NULL or no folder: private memory. Errors: PD_E_UNSUPPORTED (a
 * format without kernels, a shape they cannot take), PD_E_INVALID (a tensor missing or not of the
 * model's shape), PD_E_NOMEM; logged with the tensor's name. */
PD_CHECKED pd_status kern_weights_init(const pd_model_file *file, const kern_ops *ops,
                                       const kern_split *split, const kern_packs_place *place,
                                       kern_weights *weights_out);
void kern_weights_fini(kern_weights *weights);
