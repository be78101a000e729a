/* What encoders add to a decoder's kernels: attention of packed sequences over themselves, LayerNorm, and exact gelu.
 *
 * qkv[tokens][3][heads][head_dim]: the keys of a sequence are rows of the step itself, so they are read in place. An item
 * is one head and a tile of one sequence's queries; keys pass by in tiles, as in a prompt's attention. */
#include "attention_prefill.h"
#include "pool.h"

enum { ITEM_FLOATS = 16 * 1024 }; /* a few microseconds of work: less is cheaper done than handed out */

typedef struct {
    const float *qkv;
    float *out;
    const int32_t *starts, *items; /* items: pairs of a sequence and its first query */
    long num_heads, dim;
    float scale;
} packed_job;

static void packed_item(void *context, long index) {
    const packed_job *job = context;
    const long head = index % job->num_heads, seq = job->items[index / job->num_heads * 2];
    const long first = job->items[index / job->num_heads * 2 + 1], begin = job->starts[seq];
    const long length = job->starts[seq + 1] - begin, rows = MIN(PREFILL_ROWS, length - first);
    const long dim = job->dim, wide_dim = (dim + NR - 1) / NR * NR, width = job->num_heads * dim, stride = 3 * width;
    prefill_buffers *b; /* too large for some systems' thread stacks */
    if (posix_memalign((void **)&b, 64, sizeof *b) != 0) abort();

    const float *q = job->qkv + (begin + first) * stride + head * dim;
    for (long r = 0; r < rows; r++) {
        for (long d = 0; d < dim; d++) b->q[r * dim + d] = q[r * stride + d] * job->scale;
        b->maximum[r] = -INFINITY;
        b->sum[r] = 0;
    }
    memset(b->out, 0, (size_t)(rows * wide_dim) * sizeof(float));
    if (dim < wide_dim) memset(b->v, 0, sizeof b->v); /* the padding columns must stay finite */
    for (long key = 0; key < length; key += PREFILL_KEYS) {
        const long count = MIN(PREFILL_KEYS, length - key), panels = (count + NR - 1) / NR;
        const float *k = job->qkv + (begin + key) * stride + width + head * dim, *v = k + width;
        for (long j = 0; j < count; j++) {
            float *to = b->k + j / NR * dim * NR + j % NR;
            for (long d = 0; d < dim; d++) to[d * NR] = k[j * stride + d];
            memcpy(b->v + j * wide_dim, v + j * stride, (size_t)dim * sizeof(float));
        }
        for (long j = count; j < panels * NR; j++) /* the last panel's other columns: any finite number */
            for (long d = 0; d < dim; d++) b->k[j / NR * dim * NR + j % NR + d * NR] = 0;
        multiply((tile){.a = b->q, .a_stride = dim, .b = b->k, .b_stride = NR, .panel_stride = dim * NR, .c = b->scores,
                        .c_stride = PREFILL_KEYS, .depth = dim}, rows, panels);
        for (long r = 0; r < rows; r++) {
            const float before = b->maximum[r];
            const float sum = exponentials(b->scores + r * PREFILL_KEYS, 0, count, 0, &b->maximum[r]);
            if (b->maximum[r] > before && key > 0) {
                const float factor = expf(before - b->maximum[r]);
                b->sum[r] *= factor;
                for (long d = 0; d < dim; d++) b->out[r * wide_dim + d] *= factor;
            }
            b->sum[r] += sum;
        }
        multiply((tile){.a = b->scores, .a_stride = PREFILL_KEYS, .b = b->v, .b_stride = wide_dim, .panel_stride = NR,
                        .c = b->out, .c_stride = wide_dim, .depth = count, .accumulate = 1}, rows, wide_dim / NR);
    }
    for (long r = 0; r < rows; r++) {
        float *out = job->out + (begin + first + r) * width + head * dim;
        const float inverse = 1.0f / b->sum[r];
        for (long d = 0; d < dim; d++) out[d] = b->out[r * wide_dim + d] * inverse;
    }
    free(b);
}

/* starts: [num_seqs + 1] */
void EXPORT(packed_attention)(quire_pool *pool, const float *qkv, float *out, const int32_t *starts, int64_t num_seqs,
                              int64_t num_heads, int64_t dim, float scale) {
    long count = 0;
    for (long seq = 0; seq < num_seqs; seq++) count += (starts[seq + 1] - starts[seq] + PREFILL_ROWS - 1) / PREFILL_ROWS;
    int32_t *items = malloc((size_t)(2 * count + 1) * sizeof(int32_t));
    if (!items) abort(); /* a few kilobytes: the process is past saving */
    count = 0;
    for (long seq = 0; seq < num_seqs; seq++)
        for (long first = 0; first < starts[seq + 1] - starts[seq]; first += PREFILL_ROWS, count++) {
            items[2 * count] = (int32_t)seq;
            items[2 * count + 1] = (int32_t)first;
        }
    packed_job job = {.qkv = qkv, .out = out, .starts = starts, .items = items, .num_heads = num_heads, .dim = dim, .scale = scale};
    quire_parallel(pool, count * num_heads, packed_item, &job);
    free(items);
}

typedef struct {
    const float *x, *weight, *bias;
    float *residual, *out;
    long rows, width, rows_per_item;
    float eps;
} norm_job;

static void layer_norm_item(void *context, long item) {
    const norm_job *job = context;
    const long end = MIN((item + 1) * job->rows_per_item, job->rows), width = job->width;
    for (long row = item * job->rows_per_item; row < end; row++) {
        const float *x = job->x + row * width;
        float *out = job->out + row * width, mean = 0, square = 0;
        if (job->residual) {
            float *residual = job->residual + row * width;
            for (long i = 0; i < width; i++) residual[i] += x[i];
            x = residual;
        }
        vf sum = {0}, squares = {0};
        long i = 0;
        for (; i + VL <= width; i += VL) sum += load(x + i);
        mean = sum_lanes(sum);
        for (; i < width; i++) mean += x[i];
        mean /= (float)width;
        for (i = 0; i + VL <= width; i += VL) {
            const vf d = load(x + i) - mean;
            squares += d * d;
        }
        square = sum_lanes(squares);
        for (; i < width; i++) square += (x[i] - mean) * (x[i] - mean);
        const float factor = 1.0f / sqrtf(square / (float)width + job->eps);
        for (i = 0; i < width; i++) out[i] = (x[i] - mean) * factor * job->weight[i] + job->bias[i];
    }
}

/* out = layer_norm(x), or of residual += x where there is a residual. */
void EXPORT(layer_norm)(quire_pool *pool, const float *x, float *residual, const float *weight, const float *bias, float *out,
                        int64_t rows, int64_t width, float eps) {
    norm_job job = {.x = x, .residual = residual, .weight = weight, .bias = bias, .out = out, .rows = rows, .width = width, .eps = eps};
    job.rows_per_item = MAX(1, ITEM_FLOATS / MAX(1, width));
    quire_parallel(pool, (rows + job.rows_per_item - 1) / job.rows_per_item, layer_norm_item, &job);
}

/* x / 2 * (1 + erf(x / sqrt 2)), by Abramowitz and Stegun 7.1.26: erf to 1.5e-7. */
INLINE vf gelu(vf x) {
    const vf a = vmax(x, -x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * a);
    vf p = splat(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const vf tail = 0.5f * p * t * vexp(-a * a); /* half of what erf lacks to 1 */
    return x * pick(x < 0.0f, tail, 1.0f - tail);
}

typedef struct {
    float *x;
    long count;
} gelu_job;

static void gelu_item(void *context, long item) {
    const gelu_job *job = context;
    const long end = MIN((item + 1) * ITEM_FLOATS, job->count);
    long i = item * ITEM_FLOATS;
    for (; i + VL <= end; i += VL) store(job->x + i, gelu(load(job->x + i)));
    if (i < end) {
        float tail[VL] = {0};
        memcpy(tail, job->x + i, (size_t)(end - i) * sizeof(float));
        store(tail, gelu(load(tail)));
        memcpy(job->x + i, tail, (size_t)(end - i) * sizeof(float));
    }
}

/* In place. */
void EXPORT(gelu)(quire_pool *pool, float *x, int64_t count) {
    gelu_job job = {x, count};
    quire_parallel(pool, (count + ITEM_FLOATS - 1) / ITEM_FLOATS, gelu_item, &job);
}
