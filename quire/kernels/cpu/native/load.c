/* Filling a matrix, and looking up its rows. */
#include "gguf_blocks.h"
#include "pool.h"
#include "weight.h"

typedef struct {
    const weight *w;
    float *scale;
    const float *rows;
    long first_row, num_rows, first_panel;
} pack_job;

static void pack_item(void *context, long item) {
    const pack_job *job = context;
    const weight *w = job->w;
    const int kind = (int)w->parts[0].kind;
    const long panel = job->first_panel + item, row_end = MIN((panel + 1) * NR, job->first_row + job->num_rows);
    for (long row = MAX(panel * NR, job->first_row); row < row_end; row++) {
        const float *from = job->rows + (row - job->first_row) * w->k;
        char *to = (char *)panel_at(w, w->parts, panel, 0) + row % NR * kind_bytes(kind);
        if (kind == F32) {
            for (long k = 0; k < w->k; k++) ((float *)to)[k * NR] = from[k];
        } else if (kind == BF16) {
            for (long k = 0; k < w->k; k++) ((uint16_t *)to)[k * NR] = float_to_bf16(from[k]);
        } else if (kind == F16) {
            for (long k = 0; k < w->k; k++) ((uint16_t *)to)[k * NR] = float_to_half(from[k]);
        } else {
            float largest = 0;
            for (long k = 0; k < w->k; k++) largest = MAX(largest, fabsf(from[k]));
            const float inverse = largest > 0 ? 127.0f / largest : 0;
            for (long k = 0; k < w->k; k++) ((int8_t *)to)[k * NR] = (int8_t)lrintf(from[k] * inverse);
            job->scale[row] = largest / 127.0f;
        }
    }
}

/* Fills rows [first_row, first_row + num_rows) of a plain matrix from float32 [num_rows, k]; they need not align with panels. */
void EXPORT(pack)(quire_pool *pool, const weight *w, const float *rows, int64_t first_row, int64_t num_rows) {
    pack_job job = {w, (float *)w->scale, rows, first_row, num_rows, first_row / NR};
    quire_parallel(pool, (first_row + num_rows + NR - 1) / NR - job.first_panel, pack_item, &job);
}

typedef struct {
    const weight *w;
    const part *part;
    const uint8_t *rows;
    long row_stride;
} pack_gguf_job;

INLINE void pack_panel(int kind, const pack_gguf_job *job, long panel) {
    const long columns = MIN(NR, job->part->num_rows - panel * NR);
    for (long b = 0; b < job->w->k / kind_block(kind); b++) {
        char *block = (char *)panel_at(job->w, job->part, panel, b * kind_block(kind));
        if (columns < NR) memset(block, 0, (size_t)block_bytes(kind));
        for (long column = 0; column < columns; column++) {
            gguf_block read;
            read_gguf_block(kind, job->rows + (panel * NR + column) * job->row_stride + b * gguf_bytes(kind), &read);
            block_halves(block)[column] = read.d;
            if (has_minima(kind)) block_halves(block)[NR + column] = read.m;
            if (kind_block(kind) == 256)
                for (long sub = 0; sub < subs_of(kind); sub++) {
                    block_scales(kind, block)[sub * NR + column] = read.scale[sub];
                    if (has_minima(kind)) block_minima(kind, block)[sub * NR + column] = read.minimum[sub];
                }
            for (long run = 0; run < kind_block(kind) / RUN; run++)
                store_groups(kind, (uint32_t *)block_codes(kind, block, run) + column, (const uint32_t *)(read.codes + run * RUN));
        }
    }
}

static void pack_gguf_item(void *context, long panel) {
    const pack_gguf_job *job = context;
    FOR_QUANTIZED_KIND(job->part->kind, pack_panel(kind, job, panel))
}

/* Of NR rows of k inputs. */
int64_t EXPORT(packed_panel_bytes)(int64_t packed_kind, int64_t k) {
    int64_t bytes = 0;
    FOR_QUANTIZED_KIND(packed_kind, bytes = k / kind_block(kind) * block_bytes(kind))
    return bytes;
}

/* Fills a packed part from rows as a GGUF file has them, row_stride bytes apart. */
void EXPORT(pack_gguf)(quire_pool *pool, const weight *w, int64_t number, const uint8_t *rows, int64_t row_stride) {
    pack_gguf_job job = {w, &w->parts[number], rows, row_stride};
    quire_parallel(pool, part_panels(job.part), pack_gguf_item, &job);
}

INLINE void embed_quantized(int kind, const weight *w, const part *p, long row, float *to, float multiplier) {
    const long column = row % NR;
    for (long k = 0; k < w->k; k += kind_sub(kind)) {
        const char *block = panel_at(w, p, row / NR, k / kind_block(kind) * kind_block(kind));
        const long first = k % kind_block(kind), sub = first / kind_sub(kind);
        const int lane = (int)column % VL, vector = (int)column / VL;
        const vf scale = sub_scale(kind, block, sub, vector);
        const vf minimum = has_minima(kind) ? sub_minimum(kind, block, sub, vector) : (vf){0};
        const uint32_t *codes = block_codes(kind, block, first / RUN);
        for (int i = 0; i < kind_sub(kind); i++) {
            const int input = (int)(first % RUN) + i;
            const uint32_t group = code_group(kind, codes, input / GROUP, vector)[lane];
            const vf code = (float)(group >> 8 * (input % GROUP) & 255) - (vf){0};
            to[k + i] = weight_of(kind, code, scale, minimum)[lane] * multiplier;
        }
    }
}

/* out[i] = multiplier * row ids[i] of w. */
void EXPORT(embed)(const weight *w, const int64_t *ids, float *out, int64_t count, float multiplier) {
    for (long i = 0; i < count; i++) {
        const part *p = w->parts;
        for (; p < w->parts + w->num_parts; p++)
            if (ids[i] >= p->first_row && ids[i] < p->first_row + p->num_rows) break;
        const long row = ids[i] - p->first_row;
        float *to = out + i * w->k;
        if (is_quantized((int)p->kind)) {
            FOR_QUANTIZED_KIND(p->kind, embed_quantized(kind, w, p, row, to, multiplier))
            continue;
        }
        const char *from = panel_at(w, p, row / NR, 0) + row % NR * kind_bytes((int)p->kind);
        const float factor = w->scale ? w->scale[row] * multiplier : multiplier;
        for (long k = 0; k < w->k; k++) {
            float x;
            if (p->kind == F32) {
                x = ((const float *)from)[k * NR];
            } else if (p->kind == BF16) {
                const uint32_t bits = (uint32_t)((const uint16_t *)from)[k * NR] << 16;
                memcpy(&x, &bits, 4);
            } else if (p->kind == F16) {
                x = half_to_float(((const uint16_t *)from)[k * NR]);
            } else {
                x = ((const int8_t *)from)[k * NR];
            }
            to[k] = x * factor;
        }
    }
}
