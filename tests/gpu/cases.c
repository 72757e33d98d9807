#include "tests/gpu/cases.h"

#include "common/base/mem.h"
#include "common/kv/tile_sum.h"
#include "kernels/cuda/items.h"
#include "kernels/ops.h"
#include "kernels/sampling.h"

/* Llama 3.1 8B's shape. */
enum {
    HIDDEN = 4096,
    HEADS = 32,
    KV_HEADS = 8,
    HEAD_DIM = 128,
    FFN = 14336,
    VOCAB = 128256,
    QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM,
    LEAVES = 8, /* of a row-parallel product: one a KV head */
    BLOCK_TOKENS = 16,
    GROUP_LAYERS = 1,
    BLOCKS = CASE_DECODE_ROWS * CASE_CONTEXT / BLOCK_TOKENS,
    KV_BLOCKS = 512, /* that are sealed, gathered or scattered at once */
    ITEMS = CASE_DECODE_ROWS * CASE_CONTEXT / KERN_SPLIT_TOKENS,
    /* A mixed step: one row that decodes, beside a prompt's first tokens. */
    MIXED_CONTEXT = 32768,
    MIXED_ITEMS = MIXED_CONTEXT / KERN_SPLIT_TOKENS,
    MIXED_CHUNK = CASE_PREFILL_ROWS - CU_TILE_ROWS,
    MIXED_ROWS = 1 + MIXED_CHUNK,
    CASES_MAX = 40,
};

static struct {
    const case_memory *memory;
    gpu_case cases[CASES_MAX];
    uint32_t count;
    cu_step decode, prefill, mixed;
    cu_kv kv;
    float *x, *wide, *parts, *rope, *norm;
    cu_acts hidden[2], ffn[2]; /* [0] int8 blocks, [1] bf16 halves */
    cu_seal_item *items;
    pd_block *kv_list;
    cu_sampling *sampling;
    uint32_t *tokens, *broken;
    uint64_t *seals;
    void *scratch, *run;
    unsigned char *weights[PD_DTYPES];
    uint64_t weights_bytes[PD_DTYPES];
    uint32_t turn; /* of the products */
} all;

static void *get(uint64_t bytes)
{
    return all.memory->get(all.memory->ctx, NULL, bytes);
}

static void *put(const void *host, uint64_t bytes)
{
    return all.memory->get(all.memory->ctx, host, bytes);
}

/* --- what the operations work on --- */

static bool is_half(pd_dtype dtype)
{
    return dtype == PD_BF16 || dtype == PD_F16;
}

static void make_steps(void)
{
    static uint32_t position[CASE_PREFILL_ROWS], table[CASE_PREFILL_ROWS], token[CASE_PREFILL_ROWS];
    static uint32_t tile_row[CASE_PREFILL_ROWS / CU_TILE_ROWS];
    static uint32_t tile_rows[CASE_PREFILL_ROWS / CU_TILE_ROWS];
    static pd_block blocks[BLOCKS];
    static uint32_t item_row[ITEMS], row_item[CASE_DECODE_ROWS];
    static cu_run run[CASE_DECODE_ROWS];

    for (uint32_t i = 0; i < BLOCKS; i++) /* neighbours of a sequence lie far apart */
        blocks[i] = (pd_block)((uint64_t)i * 4099 % BLOCKS);
    for (uint32_t row = 0; row < CASE_DECODE_ROWS; row++) {
        position[row] = CASE_CONTEXT - 1;
        table[row] = row * (CASE_CONTEXT / BLOCK_TOKENS);
        token[row] = row * 911;
    }
    all.decode = (cu_step){
        .rows = CASE_DECODE_ROWS,
        .token = put(token, sizeof token),
        .position = put(position, sizeof position),
        .table = put(table, sizeof table),
        .blocks = put(blocks, sizeof blocks),
        .runs = cu_items_list(position, CASE_DECODE_ROWS, ITEMS, item_row, row_item, run),
        .run = run,
    };
    all.decode.item_row = put(item_row, sizeof item_row);
    all.decode.row_item = put(row_item, sizeof row_item);
    for (uint32_t row = 0; row < CASE_PREFILL_ROWS; row++) {
        position[row] = row;
        table[row] = 0;
        token[row] = row * 13;
        tile_row[row / CU_TILE_ROWS] = row / CU_TILE_ROWS * CU_TILE_ROWS;
        tile_rows[row / CU_TILE_ROWS] = CU_TILE_ROWS;
    }
    all.prefill = all.decode;
    all.prefill.rows = CASE_PREFILL_ROWS;
    all.prefill.runs = 0;
    all.prefill.token = put(token, sizeof token);
    all.prefill.position = put(position, sizeof position);
    all.prefill.table = put(table, sizeof table);
    all.prefill.tiles = CASE_PREFILL_ROWS / CU_TILE_ROWS;
    all.prefill.tile_row = put(tile_row, sizeof tile_row);
    all.prefill.tile_rows = put(tile_rows, sizeof tile_rows);
}

/* The chunk has the long row's blocks behind its own. */
static void make_mixed(void)
{
    static uint32_t position[MIXED_ROWS], table[MIXED_ROWS], item_row[MIXED_ITEMS], row_item[1];
    static uint32_t tile_row[MIXED_CHUNK / CU_TILE_ROWS], tile_rows[MIXED_CHUNK / CU_TILE_ROWS];
    static cu_run run[1];

    position[0] = MIXED_CONTEXT - 1;
    for (uint32_t row = 1; row < MIXED_ROWS; row++) {
        uint32_t tile = (row - 1) / CU_TILE_ROWS;
        position[row] = row - 1;
        table[row] = MIXED_CONTEXT / BLOCK_TOKENS;
        tile_row[tile] = 1 + tile * CU_TILE_ROWS;
        tile_rows[tile] = CU_TILE_ROWS;
    }
    all.mixed = all.prefill;
    all.mixed.rows = MIXED_ROWS;
    all.mixed.position = put(position, sizeof position);
    all.mixed.table = put(table, sizeof table);
    all.mixed.tiles = MIXED_CHUNK / CU_TILE_ROWS;
    all.mixed.tile_row = put(tile_row, sizeof tile_row);
    all.mixed.tile_rows = put(tile_rows, sizeof tile_rows);
    all.mixed.runs = cu_items_list(position, 1, MIXED_ITEMS, item_row, row_item, run);
    all.mixed.run = run;
    all.mixed.item_row = put(item_row, sizeof item_row);
    all.mixed.row_item = put(row_item, sizeof row_item);
}

static void make_kv(void)
{
    static cu_seal_item items[KV_BLOCKS];
    static pd_block list[KV_BLOCKS];
    cu_kv *kv = &all.kv;

    *kv = (cu_kv){.layers = 1,
                  .kv_heads = KV_HEADS,
                  .head_dim = HEAD_DIM,
                  .block_tokens = BLOCK_TOKENS,
                  .group_layers = GROUP_LAYERS,
                  .blocks = BLOCKS,
                  .token_bytes = HEAD_DIM * 2};
    kv->half_bytes = BLOCK_TOKENS * kv->token_bytes;
    kv->layer_bytes = 2 * kv->half_bytes;
    uint64_t units = (uint64_t)BLOCKS * KV_HEADS, words = kv->half_bytes / 8;
    kv->pool = get(units * kv->layer_bytes);
    kv->covered = get(units * sizeof *kv->covered);
    kv->tile_sums = get(units * 2 * (words / PD_TILE_WORDS + 1) * sizeof *kv->tile_sums);
    kv->tile_keys = put(pd_tile_keys, sizeof pd_tile_keys);
    for (uint32_t i = 0; i < KV_BLOCKS; i++) {
        list[i] = (pd_block)((uint64_t)i * 4099 % BLOCKS);
        items[i] = (cu_seal_item){
            .key = i, .block = list[i], .valid_tokens = BLOCK_TOKENS, .head_to = KV_HEADS};
    }
    all.items = put(items, sizeof items);
    all.kv_list = put(list, sizeof list);
    all.seals = get(KV_BLOCKS * sizeof *all.seals);
    all.run = get(KV_BLOCKS * KV_HEADS * kv->layer_bytes);
}

/* Sums of zeros would be done with less power than others; and both signs and many sizes are what
 * tells one order of sums from another. */
static uint16_t *random_halves(uint64_t count)
{
    uint16_t *halves = pd_malloc(count * sizeof *halves);
    uint64_t random = 88172645463325252;

    pd_assert(halves != NULL);
    for (uint64_t i = 0; i < count; i++) {
        random ^= random << 13; /* xorshift64, Marsaglia 2003 */
        random ^= random >> 7;
        random ^= random << 17;
        halves[i] = (uint16_t)((random & 0x807f) | (119 + (random >> 32 & 7)) << 7);
    }
    return halves;
}

static void make_acts(cu_acts pair[2], uint32_t cols)
{
    uint64_t n = (uint64_t)CASE_PREFILL_ROWS * cols;

    pair[0] = (cu_acts){.cols = cols,
                        .quants = get(n),
                        .scales = get(n / 8),
                        .sums = get(n / 8),
                        .quant_sums = get(n / 8)};
    uint16_t *halves = all.memory->l2_bytes > 0 ? random_halves(n) : NULL;
    pair[1] = (cu_acts){.cols = cols, .halves = put(halves, 2 * n), .halves_are_bf16 = true};
    pd_free(halves);
}

static void make_rows(void)
{
    static cu_sampling sampling[CASE_DECODE_ROWS];
    uint64_t widest = 2 * FFN;
    uint64_t logits = (uint64_t)CASE_DECODE_ROWS * VOCAB, wide = widest * CASE_PREFILL_ROWS;
    uint64_t decode = ITEMS * cu_attention_item_bytes(HEADS, HEAD_DIM);
    uint64_t chunk =
        cu_attention_scratch_bytes(CASE_PREFILL_ROWS, HEADS, HEAD_DIM, CASE_PREFILL_ROWS);
    uint64_t sample = cu_sample_scratch_bytes(CASE_DECODE_ROWS, VOCAB);
    uint64_t scratch = decode > chunk ? decode : chunk;

    for (uint32_t row = 0; row < CASE_DECODE_ROWS; row++)
        sampling[row] = (cu_sampling){.temperature = 0.8f, .top_p = 0.95f, .seed = row};
    all.x = get(4ull * HIDDEN * CASE_PREFILL_ROWS);
    all.wide = get(4 * (logits > wide ? logits : wide));
    all.parts = get(4ull * HIDDEN * CASE_PREFILL_ROWS * KERN_NODES_MAX);
    all.rope = get(4ull * HEAD_DIM * CASE_CONTEXT);
    all.norm = get(4ull * HIDDEN);
    all.sampling = put(sampling, sizeof sampling);
    all.tokens = get(4ull * CASE_DECODE_ROWS);
    all.broken = get(4);
    all.scratch = get(sample > scratch ? sample : scratch);
    make_acts(all.hidden, HIDDEN);
    make_acts(all.ffn, FFN);
}

/* --- the operations --- */

static const cu_step *step_of(const gpu_case *c)
{
    if (c->rows == MIXED_ROWS)
        return &all.mixed;
    return c->rows == CASE_PREFILL_ROWS ? &all.prefill : &all.decode;
}

static pd_status embed(gpu_stream *stream, const gpu_case *c)
{
    return cu_embed(stream, step_of(c), PD_BF16, all.weights[PD_BF16], HIDDEN, 2 * HIDDEN, all.x);
}

static const cu_residual one_product = {.ranks = 1, .terms = 1, .leaves_all = LEAVES};

static pd_status norm(gpu_stream *stream, const gpu_case *c)
{
    cu_residual add = one_product;

    add.parts = all.parts;
    return cu_residual_norm(stream, c->rows, HIDDEN, all.x, &add, all.norm, 1e-5f, &all.hidden[0]);
}

static pd_status silu(gpu_stream *stream, const gpu_case *c)
{
    return cu_silu_mul(stream, c->rows, FFN, all.wide, &all.ffn[0]);
}

static pd_status append(gpu_stream *stream, const gpu_case *c)
{
    return cu_append(stream, step_of(c), &all.kv, 0, HEADS, HEAD_DIM, all.rope, all.wide);
}

static pd_status attention(gpu_stream *stream, const gpu_case *c)
{
    return cu_attention(stream, step_of(c), &all.kv, 0, HEADS, CASE_PREFILL_ROWS, 0.088f, all.wide,
                        all.x, all.scratch);
}

static void make_weights(pd_dtype dtype, uint32_t rows, uint32_t cols)
{
    uint64_t bytes = cu_pack_bytes(dtype, rows, cols) + 2 * all.memory->l2_bytes;
    bool random = is_half(dtype) && all.memory->l2_bytes > 0;
    uint16_t *halves = random ? random_halves(bytes / 2) : NULL;

    all.weights_bytes[dtype] = bytes;
    all.weights[dtype] = put(halves, bytes);
    pd_free(halves);
}

/* Where the next product's weights lie: behind those of the one before. */
static const void *next_weights(pd_dtype dtype, uint32_t rows, uint32_t cols)
{
    uint64_t bytes = cu_pack_bytes(dtype, rows, cols), places = all.weights_bytes[dtype] / bytes;

    return all.weights[dtype] + all.turn++ % places * bytes;
}

static cu_matrix matrix_of(const gpu_case *c, uint32_t rows, uint32_t cols, uint32_t leaves)
{
    return (cu_matrix){.dtype = c->dtype,
                       .rows = rows,
                       .cols = cols,
                       .leaves = leaves,
                       .leaves_all = leaves,
                       .data = next_weights(c->dtype, rows, cols)};
}

static pd_status qkv(gpu_stream *stream, const gpu_case *c)
{
    cu_matrix m = matrix_of(c, QKV, HIDDEN, 1);
    return cu_matmul(stream, &m, &all.hidden[is_half(c->dtype)], c->rows, all.wide, QKV);
}

static pd_status gate_up(gpu_stream *stream, const gpu_case *c)
{
    cu_matrix m = matrix_of(c, 2 * FFN, HIDDEN, 1);
    return cu_matmul(stream, &m, &all.hidden[is_half(c->dtype)], c->rows, all.wide, 2 * FFN);
}

static pd_status down(gpu_stream *stream, const gpu_case *c)
{
    cu_matrix m = matrix_of(c, HIDDEN, FFN, LEAVES);
    return cu_matmul_nodes(stream, &m, &all.ffn[is_half(c->dtype)], c->rows, all.parts);
}

static pd_status head(gpu_stream *stream, const gpu_case *c)
{
    cu_matrix m = matrix_of(c, VOCAB, HIDDEN, 1);
    return cu_matmul(stream, &m, &all.hidden[is_half(c->dtype)], c->rows, all.wide, VOCAB);
}

static pd_status sample(gpu_stream *stream, const gpu_case *c)
{
    return cu_sample(stream, c->rows, VOCAB, all.wide, all.sampling, all.tokens, all.broken,
                     all.scratch);
}

static pd_status seal_bytes(gpu_stream *stream, const gpu_case *c)
{
    return cu_seal(stream, &all.kv, c->rows, all.items, true, all.seals);
}

static pd_status gather(gpu_stream *stream, const gpu_case *c)
{
    return cu_kv_gather(stream, &all.kv, 0, c->rows, all.kv_list, 0, KV_HEADS, all.run);
}

static pd_status scatter(gpu_stream *stream, const gpu_case *c)
{
    return cu_kv_scatter(stream, &all.kv, 0, c->rows, all.kv_list, 0, KV_HEADS, all.run);
}

/* --- the table --- */

static void add(const char *name, pd_status (*queue)(gpu_stream *, const gpu_case *), uint32_t rows,
                cu_work work)
{
    pd_assert(all.count < CASES_MAX);
    all.cases[all.count++] =
        (gpu_case){.name = name, .queue = queue, .rows = rows, .work = work, .dtype = PD_F32};
}

static void add_product(const char *name, pd_status (*queue)(gpu_stream *, const gpu_case *),
                        pd_dtype dtype, uint32_t rows, uint32_t out, uint32_t cols, uint32_t nodes)
{
    cu_matrix m = {.dtype = dtype, .rows = out, .cols = cols};
    const cu_acts *acts = cols == FFN ? &all.ffn[is_half(dtype)] : &all.hidden[is_half(dtype)];

    add(name, queue, rows, cu_work_matmul(&m, acts, rows, nodes));
    all.cases[all.count - 1].dtype = dtype;
}

static void add_decode(void)
{
    const uint32_t rows = CASE_DECODE_ROWS;

    add("decode 32: embedding", embed, rows, (cu_work){.bytes = rows * 6.0 * HIDDEN});
    add("decode 32: residual + norm", norm, rows, cu_work_norm(rows, HIDDEN, 1, &all.hidden[0]));
    add("decode 32: RoPE + append", append, rows, cu_work_append(rows, HEADS, &all.kv));
    add("decode 32: attention, 4096 tokens each", attention, rows,
        cu_work_attention(rows, CASE_CONTEXT, 1, HEADS, &all.kv));
    add("decode 32: SwiGLU", silu, rows, cu_work_silu_mul(rows, FFN, &all.ffn[0]));
    add("decode 32: sampling", sample, rows, cu_work_sample(rows, VOCAB));
    add_product("decode 1: gate and up, Q4_1", gate_up, PD_Q4_1, 1, 2 * FFN, HIDDEN, 1);
    add_product("decode 1: gate and up, Q8_0", gate_up, PD_Q8_0, 1, 2 * FFN, HIDDEN, 1);
    add_product("decode 1: gate and up, bf16", gate_up, PD_BF16, 1, 2 * FFN, HIDDEN, 1);
    add_product("decode 1: down, Q4_1", down, PD_Q4_1, 1, HIDDEN, FFN, 1);
    add_product("decode 32: q, k and v, Q4_1", qkv, PD_Q4_1, rows, QKV, HIDDEN, 1);
    add_product("decode 32: gate and up, Q4_1", gate_up, PD_Q4_1, rows, 2 * FFN, HIDDEN, 1);
    add_product("decode 32: gate and up, bf16", gate_up, PD_BF16, rows, 2 * FFN, HIDDEN, 1);
    add_product("decode 32: down, Q4_1", down, PD_Q4_1, rows, HIDDEN, FFN, 1);
    add_product("decode 32: head, Q8_0", head, PD_Q8_0, rows, VOCAB, HIDDEN, 1);
}

static void add_prefill(void)
{
    const uint32_t rows = CASE_PREFILL_ROWS;

    add("prefill 2048: residual + norm", norm, rows, cu_work_norm(rows, HIDDEN, 1, &all.hidden[0]));
    add("prefill 2048: RoPE + append", append, rows, cu_work_append(rows, HEADS, &all.kv));
    add("prefill 2048: attention", attention, rows,
        cu_work_attention(1, rows, rows, HEADS, &all.kv));
    cu_work one = cu_work_attention(1, MIXED_CONTEXT, 1, HEADS, &all.kv);
    cu_work chunk = cu_work_attention(1, MIXED_CHUNK, MIXED_CHUNK, HEADS, &all.kv);
    add("prefill 2032 and a row of 32768: attention", attention, MIXED_ROWS,
        (cu_work){.bytes = one.bytes + chunk.bytes, .macs = one.macs + chunk.macs});
    add("prefill 2048: SwiGLU", silu, rows, cu_work_silu_mul(rows, FFN, &all.ffn[0]));
    add_product("prefill 2048: gate and up, Q4_1", gate_up, PD_Q4_1, rows, 2 * FFN, HIDDEN, 1);
    add_product("prefill 2048: gate and up, bf16", gate_up, PD_BF16, rows, 2 * FFN, HIDDEN, 1);
    add_product("prefill 2048: down, Q4_1", down, PD_Q4_1, rows, HIDDEN, FFN, 1);
    add("512 blocks of a layer: seal from bytes", seal_bytes, KV_BLOCKS,
        cu_work_blocks(&all.kv, GROUP_LAYERS, KV_BLOCKS, false));
    add("512 blocks of a layer: gather", gather, KV_BLOCKS,
        cu_work_blocks(&all.kv, GROUP_LAYERS, KV_BLOCKS, true));
    add("512 blocks of a layer: scatter", scatter, KV_BLOCKS,
        cu_work_blocks(&all.kv, GROUP_LAYERS, KV_BLOCKS, true));
}

case_product cases_wide(void)
{
    return (case_product){.matrix = {.dtype = PD_BF16,
                                     .rows = 2 * FFN,
                                     .cols = HIDDEN,
                                     .leaves = 1,
                                     .leaves_all = 1,
                                     .data = all.weights[PD_BF16]},
                          .acts = all.hidden[1],
                          .out = all.wide};
}

const gpu_case *cases_make(const case_memory *memory, uint32_t *count_out)
{
    all.memory = memory;
    make_steps();
    make_mixed();
    make_kv();
    make_rows();
    make_weights(PD_Q4_1, 2 * FFN, HIDDEN);
    make_weights(PD_Q8_0, VOCAB, HIDDEN);
    make_weights(PD_BF16, 2 * FFN, HIDDEN);
    add_decode();
    add_prefill();
    *count_out = all.count;
    return all.cases;
}
