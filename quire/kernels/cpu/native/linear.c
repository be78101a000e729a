/* Linear layers. A weight [n, k] is stored as panels of NR outputs, interleaved along k:
 *
 *     data[panel][k][NR]        the last panel padded with zeros
 *
 * so that a call streams memory in one direction at any number of rows, and a register tile's columns lie side by side.
 * Narrow types are widened in registers (one row) or, once a panel, into a buffer that all rows then reuse. Weights packed
 * as in a GGUF file are multiplied by activations in 8 bits, unless the product is to be exact. */
#include "pool.h"
#include "quantized_tile.h"
#include "tile.h"
#include "weight.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum {
    DEPTH_BLOCK = 384,                  /* of k: this part of a panel stays in L1, or near, while the rows pass over it */
    ROW_BLOCK = 96,                     /* rows whose activations stay in L2 while the panels pass */
    QUANTIZED_ROW_BLOCK = 192,          /* likewise in 8 bits: more, since each block of rows unpacks the panels again */
    STREAM_AHEAD = 4096,                /* bytes between a single row's reads and its prefetches */
    MAX_SPANS = 64,
    PAIR_ROWS = 3, /* up to so many rows run over two panels at once */
};

/* Panels that one thread works through in memory's order; threads that are done help the others. */
typedef struct {
    _Alignas(64) atomic_long next; /* counts through the span once for each block of rows */
    long first_panel, num_panels;
} span;

typedef struct {
    const weight *w;
    const float *x;
    const char *quantized_x; /* [rows] in 8 bits, where the product is by those */
    float *out;
    long rows, row_block, num_row_blocks, panels_at_once, num_spans;
    int activation; /* of each result while it is in the cache; or -1 */
    span spans[MAX_SPANS];
} linear_job;

int EXPORT(panel_columns)(void) { return NR; }

/* Where a panel of the matrix lies, and which outputs it gives. */
typedef struct {
    const part *part;
    long panel;              /* in the part */
    long column, num_columns; /* of the result */
} panel_place;

static panel_place find_panel(const weight *w, long panel) {
    const part *p = w->parts;
    for (; panel >= part_panels(p); p++) panel -= part_panels(p);
    return (panel_place){p, panel, p->first_row + panel * NR, MIN(NR, p->num_rows - panel * NR)};
}

static void finish_with(tile *t, const weight *w, long column) {
    t->scale = w->scale ? w->scale + column : NULL;
    t->bias = w->bias ? w->bias + column : NULL;
}

INLINE void widen(int kind, const void *from, float *to, long count) {
    for (long i = 0; i < count; i += VL) store(to + i, load_wide(kind, from, i));
}

/* depth inputs from k on. */
static void widen_panel(const weight *w, const panel_place *at, long k, float *to, long depth) {
    const int plain = (int)at->part->kind;
    const char *from = panel_at(w, at->part, at->panel, is_quantized(plain) ? 0 : k);
    if (plain == BF16) widen(BF16, from, to, depth * NR);
    else if (plain == F16) widen(F16, from, to, depth * NR);
    else if (plain == I8) widen(I8, from, to, depth * NR);
    else FOR_QUANTIZED_KIND(plain, widen_quantized(kind, from, k, to, depth))
}

/* One row: all of the work is reading the weights. Two panels make two streams of them, and enough sums in flight to
 * hide the multipliers' latency. */
INLINE void one_row_of_kind(tile *t, int kind, long panels) {
    t->ahead = (const char *)t->b + STREAM_AHEAD;
    t->ahead_step = NR * kind_bytes(kind);
    const int lines = MAX(1, NR * kind_bytes(kind) / 64);
    if (panels == 2) run_tile(t, 1, 2 * NV, kind, lines);
    else run_tile(t, 1, NV, kind, lines);
}

static void one_row(const linear_job *job, const panel_place *at, long panels, float *out) {
    const weight *w = job->w;
    tile t = {.a = job->x, .b = panel_at(w, at->part, at->panel, 0), .b_stride = NR, .panel_stride = w->k * NR, .c = out,
              .depth = w->k};
    finish_with(&t, w, at->column);
    const long kind = at->part->kind;
    if (kind == F32) one_row_of_kind(&t, F32, panels);
    else if (kind == BF16) one_row_of_kind(&t, BF16, panels);
    else if (kind == F16) one_row_of_kind(&t, F16, panels);
    else one_row_of_kind(&t, I8, panels);
}

/* Two or three rows of float32. */
static void panel_pair(const linear_job *job, const panel_place *at) {
    const weight *w = job->w;
    tile t = {.a = job->x, .a_stride = w->k, .b = panel_at(w, at->part, at->panel, 0), .b_stride = NR,
              .panel_stride = w->k * NR, .c = job->out + at->column, .c_stride = w->n, .depth = w->k};
    finish_with(&t, w, at->column);
    t.ahead = (const char *)t.b + STREAM_AHEAD;
    t.ahead_step = NR * sizeof(float);
    enum { LINES = NR * sizeof(float) / 64 };
    if (job->rows == 2) run_tile(&t, 2, 2 * NV, F32, LINES);
    else run_tile(&t, 3, 2 * NV, F32, LINES);
}

/* Rows [row0, row1) of one whole panel, to out[row - row0]. While the rows pass over one part of it, the part that follows in
 * memory is fetched, a share with each tile of rows: the weights arrive behind the arithmetic. */
static void panel_rows(const linear_job *job, const panel_place *at, long row0, long row1, float *out, long out_stride) {
    const weight *w = job->w;
    const int kind = (int)at->part->kind;
    const long rows = row1 - row0, height = tile_height(rows), num_tiles = (rows + height - 1) / height;
    const long num_blocks = (w->k + DEPTH_BLOCK - 1) / DEPTH_BLOCK;
    long block = (w->k + num_blocks - 1) / num_blocks;
    if (is_quantized(kind)) block = (block + RUN - 1) / RUN * RUN;
    const long k_bytes = is_quantized(kind) ? 0 : NR * kind_bytes(kind);
    _Alignas(64) float wide[DEPTH_BLOCK * NR];
    for (long k = 0; k < w->k; k += block) {
        tile t = {.a_stride = w->k, .b_stride = NR, .c_stride = out_stride, .depth = MIN(block, w->k - k), .accumulate = k > 0};
        t.b = panel_at(w, at->part, at->panel, is_quantized(kind) ? 0 : k);
        t.ahead = (const char *)t.b + t.depth * k_bytes;
        t.ahead_step = (k_bytes + num_tiles - 1) / num_tiles;
        if (k + block >= w->k) finish_with(&t, w, at->column);
        if (kind != F32) {
            widen_panel(w, at, k, wide, t.depth);
            t.b = wide;
        }
        for (long r = row0; r < row1; r += height) {
            t.a = job->x + r * w->k + k;
            t.c = out + (r - row0) * out_stride;
            run_panel_tile(&t, (int)MIN(height, row1 - r), NR * sizeof(float) / 64);
            t.ahead += t.depth * t.ahead_step;
        }
    }
}

/* A register tile of up to QUANTIZED_ROWS rows. */
INLINE void quantized_tile_rows(int kind, long rows, const unpacked_panel *panel, const quantized_row *x, long k, long depth,
                                int offset_bits, const float *bias, float *c, long c_stride) {
    switch (rows) {
#define CASE(n) case n: quantized_tile(kind, n, panel, x, k, depth, offset_bits, bias, c, c_stride); break;
        CASE(1) CASE(2)
#if defined(__AVX512F__) || defined(__aarch64__)
        CASE(3)
#endif
#if defined(__AVX512F__)
        CASE(4) CASE(5) CASE(6)
#endif
#undef CASE
    }
}

typedef void (*tile_function)(long, const unpacked_panel *, const quantized_row *, long, long, int, const float *, float *, long);
#define DEFINE(KIND)                                                                                                   \
    static void tile_##KIND(long rows, const unpacked_panel *panel, const quantized_row *x, long k, long depth,        \
                            int offset_bits, const float *bias, float *c, long c_stride) {                             \
        quantized_tile_rows(KIND, rows, panel, x, k, depth, offset_bits, bias, c, c_stride);                           \
    }
DEFINE(Q2_K) DEFINE(Q4_K) DEFINE(Q6_K) DEFINE(Q4_0) DEFINE(Q8_0)
#undef DEFINE

INLINE tile_function tile_of(int kind) {
    const int of = kind_class(kind);
    return of == Q2_K ? tile_Q2_K : of == Q4_K ? tile_Q4_K : of == Q6_K ? tile_Q6_K : of == Q4_0 ? tile_Q4_0 : tile_Q8_0;
}

/* Up to QUANTIZED_ROWS rows straight from the packed blocks. Each number of rows is a function of its own: in one function the
 * loops would spill each other's addresses, which costs a sixth of the speed. Processors with a large L1 have VNNI. */
typedef void (*few_rows_function)(const char *, const quantized_row *, long, const float *, float *, long);
#define FEW(KIND, ROWS, L1)                                                                                            \
    static __attribute__((noinline)) void few_##KIND##_##ROWS##_##L1(const char *panel, const quantized_row *x,        \
                                                                     long k, const float *bias, float *out, long stride) { \
        few_rows_quantized(KIND, ROWS, L1, panel, x, k, bias, out, stride);                                            \
    }
#define NAME(KIND, ROWS, L1) few_##KIND##_##ROWS##_##L1,
#if defined(__AVX512F__)
#define EACH_FEW(OF, KIND, L1) OF(KIND, 1, L1) OF(KIND, 2, L1) OF(KIND, 3, L1) OF(KIND, 4, L1) OF(KIND, 5, L1) OF(KIND, 6, L1)
#elif defined(__aarch64__)
#define EACH_FEW(OF, KIND, L1) OF(KIND, 1, L1) OF(KIND, 2, L1) OF(KIND, 3, L1)
#else
#define EACH_FEW(OF, KIND, L1) OF(KIND, 1, L1) OF(KIND, 2, L1)
#endif
#if defined(__AVX512VNNI__)
#define FEW_OF(KIND) EACH_FEW(FEW, KIND, 0) EACH_FEW(FEW, KIND, 1)
#define NAMES_OF(KIND) {EACH_FEW(NAME, KIND, 0)}, {EACH_FEW(NAME, KIND, 1)}
#else
#define FEW_OF(KIND) EACH_FEW(FEW, KIND, 0)
#define NAMES_OF(KIND) {EACH_FEW(NAME, KIND, 0)}, {EACH_FEW(NAME, KIND, 0)}
#endif
extern int quire_has_large_l1;

/* What panel_rows does, for packed weights and activations in 8 bits. */
INLINE void quantized_rows(int kind, const few_rows_function *few, const linear_job *job, const char *panel, const float *bias,
                           long row0, long row1, float *out, long out_stride) {
    const long k_end = job->w->k;
    if (row1 - row0 <= QUANTIZED_ROWS) {
        quantized_row x[QUANTIZED_ROWS];
        for (long i = 0; i < row1 - row0; i++) x[i] = row_at(job->quantized_x, k_end, row0 + i);
        few[row1 - row0 - 1](panel, x, k_end, bias, out, out_stride);
        return;
    }
    const long tiles = (row1 - row0 + QUANTIZED_ROWS - 1) / QUANTIZED_ROWS, height = (row1 - row0 + tiles - 1) / tiles;
    unpacked_panel unpacked;
    for (long k = 0; k < k_end; k += QUANTIZED_DEPTH) {
        const long depth = MIN(QUANTIZED_DEPTH, k_end - k);
        unpack_panel(kind, panel, k, depth, &unpacked);
        const char *next = panel + (k + depth) / kind_block(kind) * block_bytes(kind);
        const long next_bytes = depth / kind_block(kind) * block_bytes(kind), share = (next_bytes / tiles + 63) / 64 * 64;
        for (long r = row0; r < row1; r += height, next += share) {
            for (long line = 0; line < share; line += 64) __builtin_prefetch(next + line, 0, 2);
            quantized_row x[QUANTIZED_ROWS];
            const long rows = MIN(height, row1 - r);
            for (long i = 0; i < rows; i++) x[i] = row_at(job->quantized_x, k_end, r + i);
            tile_of(kind)(rows, &unpacked, x, k, depth, kind_offset_bits(kind), k + depth == k_end ? bias : NULL,
                          out + (r - row0) * out_stride, out_stride);
        }
    }
}

#define DEFINE(KIND)                                                                                                   \
    FEW_OF(KIND)                                                                                                       \
    static __attribute__((noinline)) void rows_##KIND(const linear_job *job, const char *panel, const float *bias,     \
                                                      long row0, long row1, float *out, long out_stride) {             \
        static const few_rows_function few[2][QUANTIZED_ROWS] = {NAMES_OF(KIND)};                                      \
        quantized_rows(KIND, few[quire_has_large_l1], job, panel, bias, row0, row1, out, out_stride);                  \
    }
DEFINE(Q4_0) DEFINE(Q4_1) DEFINE(Q5_0) DEFINE(Q5_1) DEFINE(Q8_0) DEFINE(Q2_K) DEFINE(Q3_K) DEFINE(Q4_K) DEFINE(Q5_K) DEFINE(Q6_K)
#undef DEFINE

typedef void (*quantized_rows_function)(const linear_job *, const char *, const float *, long, long, float *, long);
static const quantized_rows_function ROWS_OF_KIND[] = {rows_Q4_0, rows_Q4_1, rows_Q5_0, rows_Q5_1, rows_Q8_0,
                                                       rows_Q2_K, rows_Q3_K, rows_Q4_K, rows_Q5_K, rows_Q6_K};

static void any_rows(const linear_job *job, const panel_place *at, long row0, long row1, float *out, long out_stride) {
    const weight *w = job->w;
    if (is_quantized((int)at->part->kind) && !w->exact) {
        const float *bias = w->bias ? w->bias + at->column : NULL;
        ROWS_OF_KIND[at->part->kind - Q4_0](job, panel_at(w, at->part, at->panel, 0), bias, row0, row1, out, out_stride);
    } else {
        panel_rows(job, at, row0, row1, out, out_stride);
    }
}

/* A part's last panel when its rows are no multiple of NR: whole, into a buffer, of which the real columns are copied. */
static void ragged_panel(const linear_job *job, const panel_place *at, long row0, long row1) {
    float columns[NR];
    for (long row = row0; row < row1; row++) {
        any_rows(job, at, row, row + 1, columns, NR);
        memcpy(job->out + row * job->w->n + at->column, columns, (size_t)at->num_columns * sizeof(float));
    }
}

static void activate_panels(const linear_job *job, long row0, long row1, long column, long count) {
    for (long row = row0; row < row1; row++) {
        float *x = job->out + row * job->w->n + column, tail[VL] = {0};
        long i = 0;
        for (; i + VL <= count; i += VL) store(x + i, activate(load(x + i), job->activation));
        if (i == count) continue;
        memcpy(tail, x + i, (size_t)(count - i) * sizeof(float));
        store(tail, activate(load(tail), job->activation));
        memcpy(x + i, tail, (size_t)(count - i) * sizeof(float));
    }
}

static void work_through(linear_job *job, span *s) {
    for (;;) {
        const long next = atomic_fetch_add_explicit(&s->next, job->panels_at_once, memory_order_relaxed);
        if (next >= job->num_row_blocks * s->num_panels) return;
        const long row0 = next / s->num_panels * job->row_block, row1 = MIN(row0 + job->row_block, job->rows);
        const long first = s->first_panel + next % s->num_panels;
        const long end = MIN(first + job->panels_at_once, s->first_panel + s->num_panels);
        for (long panel = first; panel < end; panel++) {
            const panel_place at = find_panel(job->w, panel);
            const int plain = !is_quantized((int)at.part->kind), pair = end - panel == 2 && (at.panel + 2) * NR <= at.part->num_rows;
            if (at.num_columns < NR) ragged_panel(job, &at, row0, row1);
            else if (plain && job->rows == 1) one_row(job, &at, 1 + pair, job->out + at.column);
            else if (plain && pair) panel_pair(job, &at);
            else any_rows(job, &at, row0, row1, job->out + row0 * job->w->n + at.column, job->w->n);
            panel += plain && pair;
            if (job->activation >= 0) activate_panels(job, row0, row1, at.column, plain && pair ? 2 * NR : at.num_columns);
        }
    }
}

static void linear_item(void *context, long slot) {
    linear_job *job = context;
    for (long i = 0; i < job->num_spans; i++) work_through(job, &job->spans[(slot + i) % job->num_spans]);
}

static void quantize_item(void *context, long row) {
    const linear_job *job = context;
    const long k = job->w->k;
    const quantized_row to = row_at(job->quantized_x, k, row);
    quantize_row(job->x + row * k, &to, k);
}

/* A thread's memory for activations in 8 bits: kept, so that its pages stay mapped, and freed with the thread. */
static pthread_key_t buffer_key;
static pthread_once_t buffer_once = PTHREAD_ONCE_INIT;
static void make_buffer_key(void) { pthread_key_create(&buffer_key, free); }

static char *buffer_of(size_t bytes) {
    enum { HEAD = 64 };
    pthread_once(&buffer_once, make_buffer_key);
    char *buffer = pthread_getspecific(buffer_key);
    if (buffer == NULL || *(size_t *)buffer < bytes) {
        free(buffer);
        if (posix_memalign((void **)&buffer, 64, HEAD + bytes) != 0) abort();
        *(size_t *)buffer = bytes;
        pthread_setspecific(buffer_key, buffer);
    }
    return buffer + HEAD;
}

/* activation: of the result; -1: none. */
void EXPORT(linear_activate)(quire_pool *pool, const weight *w, const float *x, float *out, int64_t rows, int64_t activation) {
    if (rows <= 0) return;
    linear_job job;
    job.activation = (int)activation;
    job.w = w;
    job.x = x;
    job.out = out;
    job.rows = rows;
    const int in_8_bits = !w->exact && is_quantized((int)w->parts[0].kind);
    const long row_block = in_8_bits ? QUANTIZED_ROW_BLOCK : ROW_BLOCK;
    job.num_row_blocks = (rows + row_block - 1) / row_block;
    job.row_block = job.num_row_blocks > 1 ? ((rows + job.num_row_blocks - 1) / job.num_row_blocks + MR - 1) / MR * MR : rows;
    job.panels_at_once = !in_8_bits && (rows == 1 || (rows <= PAIR_ROWS && w->parts[0].kind == F32)) ? 2 : 1;
    job.num_spans = MIN(quire_pool_threads(pool), MAX_SPANS);
    /* Spans end between any two panels, not between pairs: a matrix of few panels is divided evenly. */
    long num_panels = 0;
    for (long i = 0; i < w->num_parts; i++) num_panels += part_panels(&w->parts[i]);
    for (long i = 0; i < job.num_spans; i++) {
        const long first = num_panels * i / job.num_spans, end = num_panels * (i + 1) / job.num_spans;
        job.spans[i].first_panel = first;
        job.spans[i].num_panels = end - first;
        atomic_init(&job.spans[i].next, 0);
    }
    if (in_8_bits) {
        job.quantized_x = buffer_of((size_t)(rows * quantized_row_bytes(w->k)));
        quire_parallel(pool, rows, quantize_item, &job);
    }
    quire_parallel(pool, job.num_spans, linear_item, &job);
}

void EXPORT(linear)(quire_pool *pool, const weight *w, const float *x, float *out, int64_t rows) {
    EXPORT(linear_activate)(pool, w, x, out, rows, -1);
}
