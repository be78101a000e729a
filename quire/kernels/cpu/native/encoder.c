/* What encoders add to a decoder's kernels: attention of packed sequences over themselves, and LayerNorm.
 *
 * qkv[tokens][3][heads][head_dim]: the keys of a sequence are rows of the step itself. An item is one head and some
 * hundred queries of one sequence: it lays out the keys and values of that head once, and the queries pass over them. */
#include "attention.h"
#include "pool.h"

#include <stdlib.h>

enum {
    ITEM_FLOATS = 16 * 1024, /* a few microseconds of work: less is cheaper done than handed out */
    ITEM_QUERIES = 512,      /* of one text and head: its keys are laid out once for all of them */
    QUERY_ROWS = 2 * MR,     /* queries whose scores are in the cache at once */
    SCORE_KEYS = 512,        /* keys that they meet at once: more than most texts have */
    SCORE_STRIDE = SCORE_KEYS + 16, /* no power of two: rows would share the cache's sets */
};

typedef struct {
    const float *qkv;
    float *out;
    const int32_t *starts, *items; /* items: pairs of a sequence and its first query */
    long num_heads, dim;
    float scale;
} packed_job;

/* Keys of one head as panels [length / NR][dim][NR], values as rows [length][wide_dim]; both padded with zeros. */
static void lay_out_keys(const float *k, const float *v, long stride, long length, long dim, long wide_dim, float *k_panels,
                         float *v_rows) {
    const long padded = (length + NR - 1) / NR * NR;
    enum { AHEAD = 8 }; /* keys: each lies in a page of its own, which no hardware stream follows */
    for (long j = 0; j < length; j++) {
        for (long d = 0; d < dim; d += 16) {
            __builtin_prefetch(k + (j + AHEAD) * stride + d);
            __builtin_prefetch(v + (j + AHEAD) * stride + d);
        }
        float *to = k_panels + j / NR * dim * NR + j % NR;
        for (long d = 0; d < dim; d++) to[d * NR] = k[j * stride + d];
        memcpy(v_rows + j * wide_dim, v + j * stride, (size_t)dim * sizeof(float));
        memset(v_rows + j * wide_dim + dim, 0, (size_t)(wide_dim - dim) * sizeof(float));
    }
    for (long j = length; j < padded; j++)
        for (long d = 0; d < dim; d++) k_panels[j / NR * dim * NR + j % NR + d * NR] = 0;
}

static void packed_item(void *context, long index) {
    const packed_job *job = context;
    const long head = index % job->num_heads, seq = job->items[index / job->num_heads * 2];
    const long first = job->items[index / job->num_heads * 2 + 1], begin = job->starts[seq];
    const long length = job->starts[seq + 1] - begin, end = MIN(first + ITEM_QUERIES, length);
    const long dim = job->dim, wide_dim = (dim + NR - 1) / NR * NR, width = job->num_heads * dim, stride = 3 * width;
    const long padded = (length + NR - 1) / NR * NR;
    float *k_panels, *v_rows, *q, *scores, *sums; /* too large for some systems' thread stacks */
    const long floats = padded * (dim + wide_dim) + QUERY_ROWS * (dim + wide_dim + SCORE_STRIDE);
    if (posix_memalign((void **)&k_panels, 64, (size_t)floats * sizeof(float)) != 0) abort();
    v_rows = k_panels + padded * dim;
    q = v_rows + padded * wide_dim;
    sums = q + QUERY_ROWS * dim;
    scores = sums + QUERY_ROWS * wide_dim;
    const float *of_head = job->qkv + begin * stride + head * dim;
    lay_out_keys(of_head + width, of_head + 2 * width, stride, length, dim, wide_dim, k_panels, v_rows);

    for (long query = first; query < end; query += QUERY_ROWS) {
        const long rows = MIN(QUERY_ROWS, end - query);
        float maximum[QUERY_ROWS], sum[QUERY_ROWS];
        for (long r = 0; r < rows; r++) {
            for (long d = 0; d < dim; d += 16) __builtin_prefetch(of_head + (query + QUERY_ROWS + r) * stride + d);
            for (long d = 0; d < dim; d++) q[r * dim + d] = of_head[(query + r) * stride + d] * job->scale;
            maximum[r] = -INFINITY;
            sum[r] = 0;
        }
        for (long key = 0; key < length; key += SCORE_KEYS) {
            const long count = MIN(SCORE_KEYS, length - key);
            multiply((tile){.a = q, .a_stride = dim, .b = k_panels + key * dim, .b_stride = NR, .panel_stride = dim * NR,
                            .c = scores, .c_stride = SCORE_STRIDE, .depth = dim}, rows, (count + NR - 1) / NR);
            for (long r = 0; r < rows; r++) {
                const float before = maximum[r];
                const float added = exponentials(scores + r * SCORE_STRIDE, 0, count, 0, &maximum[r]);
                if (maximum[r] > before && key > 0) {
                    const float factor = expf(before - maximum[r]);
                    sum[r] *= factor;
                    for (long d = 0; d < dim; d++) sums[r * wide_dim + d] *= factor;
                }
                sum[r] += added;
            }
            multiply((tile){.a = scores, .a_stride = SCORE_STRIDE, .b = v_rows + key * wide_dim, .b_stride = wide_dim,
                            .panel_stride = NR, .c = sums, .c_stride = wide_dim, .depth = count, .accumulate = key > 0},
                     rows, wide_dim / NR);
        }
        for (long r = 0; r < rows; r++) {
            float *out = job->out + (begin + query + r) * width + head * dim;
            const float inverse = 1.0f / sum[r];
            for (long d = 0; d < dim; d++) out[d] = sums[r * wide_dim + d] * inverse;
        }
    }
    free(k_panels);
}

/* starts: [num_seqs + 1] */
void EXPORT(packed_attention)(quire_pool *pool, const float *qkv, float *out, const int32_t *starts, int64_t num_seqs,
                              int64_t num_heads, int64_t dim, float scale) {
    long count = 0;
    for (long seq = 0; seq < num_seqs; seq++) count += (starts[seq + 1] - starts[seq] + ITEM_QUERIES - 1) / ITEM_QUERIES;
    int32_t *items = malloc((size_t)(2 * count + 1) * sizeof(int32_t));
    if (!items) abort(); /* a few kilobytes: the process is past saving */
    count = 0;
    for (long seq = 0; seq < num_seqs; seq++)
        for (long first = 0; first < starts[seq + 1] - starts[seq]; first += ITEM_QUERIES, count++) {
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
