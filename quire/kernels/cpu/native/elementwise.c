/* Norms, activations, rotary embedding with the KV write, and soft capping. Rows are independent; many of them are split
 * over threads, few of them are not worth waking one. */
#include "kv.h"
#include "pool.h"

enum { ITEM_FLOATS = 16 * 1024 }; /* a few microseconds of work: less is cheaper done than handed out */

typedef struct {
    const float *x, *weight;
    float *residual, *out;
    long rows, width, rows_per_item;
    float eps;
    int activation;
} rows_job;

static void for_rows(quire_pool *pool, rows_job *job, quire_item body) {
    job->rows_per_item = MAX(1, ITEM_FLOATS / MAX(1, job->width));
    quire_parallel(pool, (job->rows + job->rows_per_item - 1) / job->rows_per_item, body, job);
}

INLINE float inverse_rms(const float *x, long width, float eps) {
    vf sums[4] = {{0}, {0}, {0}, {0}};
    long i = 0;
    for (; i + 4 * VL <= width; i += 4 * VL)
        for (int j = 0; j < 4; j++) sums[j] += load(x + i + j * VL) * load(x + i + j * VL);
    float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < width; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / (float)width + eps);
}

static void norm_item(void *context, long item) {
    const rows_job *job = context;
    const long end = MIN((item + 1) * job->rows_per_item, job->rows), width = job->width;
    for (long row = item * job->rows_per_item; row < end; row++) {
        const float *x = job->x + row * width, *weight = job->weight;
        float *out = job->out + row * width;
        if (job->residual) {
            float *residual = job->residual + row * width;
            for (long i = 0; i < width; i++) residual[i] += x[i];
            x = residual;
        }
        const float factor = inverse_rms(x, width, job->eps);
        for (long i = 0; i < width; i++) out[i] = x[i] * factor * weight[i];
    }
}

void EXPORT(rms_norm)(quire_pool *pool, const float *x, const float *weight, float *out, int64_t rows, int64_t width,
                      float eps) {
    rows_job job = {.x = x, .weight = weight, .out = out, .rows = rows, .width = width, .eps = eps};
    for_rows(pool, &job, norm_item);
}

/* residual += x; out = rms_norm(residual). */
void EXPORT(add_rms_norm)(quire_pool *pool, const float *x, float *residual, const float *weight, float *out,
                          int64_t rows, int64_t width, float eps) {
    rows_job job = {.x = x, .residual = residual, .weight = weight, .out = out, .rows = rows, .width = width, .eps = eps};
    for_rows(pool, &job, norm_item);
}

static void act_mul_item(void *context, long item) {
    const rows_job *job = context;
    const long end = MIN((item + 1) * job->rows_per_item, job->rows), width = job->width;
    for (long row = item * job->rows_per_item; row < end; row++) {
        const float *gate = job->x + row * 2 * width, *up = gate + width;
        float *out = job->out + row * width;
        long i = 0;
        for (; i + VL <= width; i += VL) store(out + i, activate(load(gate + i), job->activation) * gated(load(up + i), job->activation));
        if (i < width) {
            float tail[VL] = {0};
            memcpy(tail, gate + i, (size_t)(width - i) * sizeof(float));
            float factors[VL] = {0};
            memcpy(factors, up + i, (size_t)(width - i) * sizeof(float));
            store(tail, activate(load(tail), job->activation) * gated(load(factors), job->activation));
            memcpy(out + i, tail, (size_t)(width - i) * sizeof(float));
        }
    }
}

/* gate_up: [rows, 2 * width] */
void EXPORT(act_mul)(quire_pool *pool, const float *gate_up, float *out, int64_t rows, int64_t width,
                     int64_t activation) {
    rows_job job = {.x = gate_up, .out = out, .rows = rows, .width = width, .activation = (int)activation};
    for_rows(pool, &job, act_mul_item);
}

static void softcap_item(void *context, long item) {
    const rows_job *job = context;
    const long end = MIN((item + 1) * ITEM_FLOATS, job->rows);
    const float cap = job->eps, inverse = 1.0f / cap;
    float *x = job->out;
    long i = item * ITEM_FLOATS;
    for (; i + VL <= end; i += VL) store(x + i, cap * vtanh(load(x + i) * inverse));
    if (i < end) { /* by the same function, whatever lies around it */
        float tail[VL] = {0};
        memcpy(tail, x + i, (size_t)(end - i) * sizeof(float));
        store(tail, cap * vtanh(load(tail) * inverse));
        memcpy(x + i, tail, (size_t)(end - i) * sizeof(float));
    }
}

/* x = cap * tanh(x / cap), in place. */
void EXPORT(softcap)(quire_pool *pool, float *x, int64_t count, float cap) {
    rows_job job = {.out = x, .rows = count, .eps = cap};
    quire_parallel(pool, (count + ITEM_FLOATS - 1) / ITEM_FLOATS, softcap_item, &job);
}

typedef struct {
    int64_t num_heads, num_kv_heads, head_dim, block_size, kv_kind, block_stride;
} rope_shape;

typedef struct {
    const float *qkv, *cos_sin, *q_norm, *k_norm;
    const int64_t *positions, *slots;
    float *q;
    char *kv;
    rope_shape shape;
    float eps;
    long tokens, tokens_per_item;
} rope_job;

INLINE void rotate_head(const float *restrict from, float *restrict to, const float *cos_sin, const float *norm,
                        float eps, long dim) {
    const long half = dim / 2;
    const float *cos = cos_sin, *sin = cos_sin + half;
    if (norm) {
        const float factor = inverse_rms(from, dim, eps);
        for (long i = 0; i < half; i++) {
            const float a = from[i] * factor * norm[i], b = from[i + half] * factor * norm[i + half];
            to[i] = a * cos[i] - b * sin[i];
            to[i + half] = b * cos[i] + a * sin[i];
        }
    } else {
        for (long i = 0; i < half; i++) {
            const float a = from[i], b = from[i + half];
            to[i] = a * cos[i] - b * sin[i];
            to[i + half] = b * cos[i] + a * sin[i];
        }
    }
}

/* x[0 .. dim) to every step-th number from `at` on. */
INLINE void store_kv(int kind, char *kv, long at, long step, const float *x, long dim) {
    if (kind == F32)
        for (long i = 0; i < dim; i++) ((float *)kv)[at + i * step] = x[i];
    else if (kind == BF16)
        for (long i = 0; i < dim; i++) ((uint16_t *)kv)[at + i * step] = float_to_bf16(x[i]);
    else
        for (long i = 0; i < dim; i++) ((uint16_t *)kv)[at + i * step] = float_to_half(x[i]);
}

static void rope_item(void *context, long item) {
    const rope_job *job = context;
    const rope_shape *s = &job->shape;
    const long dim = s->head_dim, end = MIN((item + 1) * job->tokens_per_item, job->tokens);
    float head[256];
    for (long t = item * job->tokens_per_item; t < end; t++) {
        const float *from = job->qkv + t * (s->num_heads + 2 * s->num_kv_heads) * dim;
        const float *cos_sin = job->cos_sin + job->positions[t] * dim;
        float *q = job->q + t * s->num_heads * dim;
        for (long h = 0; h < s->num_heads; h++, from += dim)
            rotate_head(from, q + h * dim, cos_sin, job->q_norm, job->eps, dim);
        const long block = job->slots[t] / s->block_size, offset = job->slots[t] % s->block_size;
        const long tile = s->block_size * dim, at = block * s->block_stride, k_at = key_at(s->block_size, dim, offset);
        for (long h = 0; h < s->num_kv_heads; h++, from += dim) {
            const float *v = from + s->num_kv_heads * dim;
            rotate_head(from, head, cos_sin, job->k_norm, job->eps, dim);
            store_kv((int)s->kv_kind, job->kv, at + h * tile + k_at, panel_keys(s->block_size), head, dim);
            store_kv((int)s->kv_kind, job->kv, at + (s->num_kv_heads + h) * tile + offset * dim, 1, v, dim);
        }
    }
}

/* block_stride counts elements from one block of this layer to the next. */
void EXPORT(rope_and_write)(quire_pool *pool, const int64_t *shape, const float *qkv, const float *cos_sin, void *kv,
                            const int64_t *positions, const int64_t *slots, float *q, const float *q_norm,
                            const float *k_norm, float eps, int64_t tokens) {
    rope_job job = {.qkv = qkv, .cos_sin = cos_sin, .q_norm = q_norm, .k_norm = k_norm, .positions = positions,
                    .slots = slots, .q = q, .kv = kv, .eps = eps, .tokens = tokens};
    memcpy(&job.shape, shape, sizeof job.shape);
    job.tokens_per_item = MAX(1, ITEM_FLOATS / ((job.shape.num_heads + 2 * job.shape.num_kv_heads) * job.shape.head_dim));
    quire_parallel(pool, (tokens + job.tokens_per_item - 1) / job.tokens_per_item, rope_item, &job);
}

/* Tokens whose bit is not set become impossible, in some lines of the logits. num_allowed: how many are left of each. */
void EXPORT(ban_tokens)(float *logits, int64_t stride, const int64_t *lines, int64_t num_lines, const uint32_t *packed, int64_t num_words,
                        int64_t num_tokens, int64_t *num_allowed) {
    for (long line = 0; line < num_lines; line++, packed += num_words) {
        float *row = logits + lines[line] * stride;
        long allowed = 0;
        for (long first = 0; first < num_tokens; first += 32) {
            const long size = MIN(32, num_tokens - first);
            const uint32_t word = packed[first / 32] & (size < 32 ? (1u << size) - 1 : ~0u);
            allowed += __builtin_popcount(word);
#if defined(__AVX512F__)
            if (size == 32) {
                const __m512 impossible = _mm512_set1_ps(-INFINITY);
                _mm512_mask_storeu_ps(row + first, (__mmask16)~word, impossible);
                _mm512_mask_storeu_ps(row + first + 16, (__mmask16)(~word >> 16), impossible);
                continue;
            }
#endif
            for (long i = 0; i < size; i++) row[first + i] = word >> i & 1 ? row[first + i] : -INFINITY;
        }
        num_allowed[line] = allowed;
    }
}
