#include "kernels/cuda/stage.h"

#include "common/base/mem.h"

#include <string.h>

enum { PIECES = 2 };

struct cu_stage {
    gpu *device;
    gpu_stream *stream;
    uint64_t piece_bytes;
    void *pieces[PIECES];
    gpu_event *sent[PIECES];
    bool under_way[PIECES];
    uint32_t at; /* the piece that was handed out last */
};

static pd_status allocate(cu_stage *stage)
{
    pd_status status = gpu_stream_create(stage->device, &stage->stream);

    for (uint32_t i = 0; status == PD_OK && i < PIECES; i++) {
        status = gpu_host_alloc(stage->device, stage->piece_bytes, &stage->pieces[i]);
        if (status == PD_OK)
            status = gpu_event_create(stage->device, &stage->sent[i]);
    }
    return status;
}

pd_status cu_stage_create(gpu *g, uint64_t piece_bytes, cu_stage **stage_out)
{
    cu_stage *stage = pd_calloc(1, sizeof *stage);

    if (stage == NULL)
        return PD_E_NOMEM;
    stage->device = g;
    stage->piece_bytes = piece_bytes;
    pd_status status = allocate(stage);
    if (status != PD_OK) {
        cu_stage_destroy(stage);
        return status;
    }
    *stage_out = stage;
    return PD_OK;
}

void cu_stage_destroy(cu_stage *stage)
{
    if (stage == NULL)
        return;
    if (stage->stream != NULL) {
        pd_status ignored = gpu_stream_wait(stage->stream); /* after a failure: logged */
        (void)ignored;
    }
    for (uint32_t i = 0; i < PIECES; i++) {
        gpu_event_destroy(stage->sent[i]);
        gpu_host_free(stage->device, stage->pieces[i]);
    }
    gpu_stream_destroy(stage->stream);
    pd_free(stage);
}

uint64_t cu_stage_piece_bytes(const cu_stage *stage)
{
    return stage->piece_bytes;
}

pd_status cu_stage_next(cu_stage *stage, void **piece_out)
{
    uint32_t next = (stage->at + 1) % PIECES;
    pd_status status = stage->under_way[next] ? gpu_event_wait(stage->sent[next]) : PD_OK;

    if (status != PD_OK)
        return status;
    stage->under_way[next] = false;
    stage->at = next;
    *piece_out = stage->pieces[next];
    return PD_OK;
}

pd_status cu_stage_send(cu_stage *stage, void *device, uint64_t bytes)
{
    pd_assert(bytes <= stage->piece_bytes && !stage->under_way[stage->at]);
    pd_status status = gpu_copy_in(stage->stream, device, stage->pieces[stage->at], bytes);
    if (status == PD_OK)
        status = gpu_event_record(stage->sent[stage->at], stage->stream);
    stage->under_way[stage->at] = status == PD_OK;
    return status;
}

pd_status cu_stage_copy(cu_stage *stage, void *device, const void *host, uint64_t bytes)
{
    pd_status status = PD_OK;

    for (uint64_t at = 0; status == PD_OK && at < bytes; at += stage->piece_bytes) {
        uint64_t some = bytes - at < stage->piece_bytes ? bytes - at : stage->piece_bytes;
        void *piece;
        status = cu_stage_next(stage, &piece);
        if (status != PD_OK)
            break;
        memcpy(piece, (const uint8_t *)host + at, some);
        status = cu_stage_send(stage, (uint8_t *)device + at, some);
    }
    return status;
}

pd_status cu_stage_finish(cu_stage *stage)
{
    return gpu_stream_wait(stage->stream);
}
