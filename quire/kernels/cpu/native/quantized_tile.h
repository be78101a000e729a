/* Products of quantized weights and activations in 8 bits: sums of integers are exact, and the floating-point sum over runs
 * of 32 inputs is taken in order, so a row's result does not depend on how many rows share the call. */
#ifndef QUIRE_QUANTIZED_TILE_H
#define QUIRE_QUANTIZED_TILE_H

#include "quantized.h"

#if defined(__AVX512F__) || defined(__aarch64__)
enum { QUANTIZED_ROWS = NV == 2 ? 6 : 3 }; /* of a register tile: a sum of integers and one of floats for each vector */
#else
enum { QUANTIZED_ROWS = 2 };
#endif
enum { QUANTIZED_DEPTH = 256 }; /* inputs of a panel that are unpacked at once, for all rows */

/* One row of activations: x is about code * scale, a scale for each run. Sums of codes serve offsets and minima. */
typedef struct {
    const int8_t *codes;                   /* [k] */
    const float *scales;                   /* [k / RUN] */
    const float *sums16, *sums32;          /* [k / 16], [k / 32]: sum of codes times scale */
    const int32_t *negated16, *negated32;  /* likewise: minus the sum of codes */
} quantized_row;

INLINE long quantized_row_bytes(long k) { return (k + k / RUN * 4 * (1 + 2 + 2 * 2) + 63) / 64 * 64; }

INLINE quantized_row row_at(const char *rows, long k, long row) {
    const char *at = rows + row * quantized_row_bytes(k);
    quantized_row x;
    x.codes = (const int8_t *)at;
    x.scales = (const float *)(at + k);
    x.sums32 = x.scales + k / 32;
    x.negated32 = (const int32_t *)(x.sums32 + k / 32);
    x.sums16 = (const float *)(x.negated32 + k / 32);
    x.negated16 = (const int32_t *)(x.sums16 + k / 16);
    return x;
}

/* 127 steps from zero to the run's largest. */
static void quantize_row(const float *x, const quantized_row *to, long k) {
    for (long run = 0; run < k / RUN; run++, x += RUN) {
        vf most = (vf){0};
        for (int i = 0; i < RUN; i += VL) most = vmax(most, vmax(load(x + i), -load(x + i)));
        const float largest = max_lanes(most), scale = largest / 127.0f, inverse = largest > 0 ? 127.0f / largest : 0;
        int32_t half[2];
        for (int h = 0; h < 2; h++) {
            vi sum = (vi){0};
            for (int i = h * RUN / 2; i < (h + 1) * RUN / 2; i += VL) {
                /* 1.5 * 2^23: the sum's low bits are the rounded integer. */
                const vi codes = (vi)(load(x + i) * inverse + 12582912.0f) - 0x4b400000;
                *(vb *)((int8_t *)to->codes + run * RUN + i) = __builtin_convertvector(codes, vb);
                sum += codes;
            }
            half[h] = sum_whole_lanes(sum);
        }
        ((float *)to->scales)[run] = scale;
        for (int h = 0; h < 2; h++) {
            ((float *)to->sums16)[2 * run + h] = (float)half[h] * scale;
            ((int32_t *)to->negated16)[2 * run + h] = -half[h];
        }
        ((float *)to->sums32)[run] = (float)(half[0] + half[1]) * scale;
        ((int32_t *)to->negated32)[run] = -(half[0] + half[1]);
    }
}

INLINE vi splat_word(const void *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return word - (vi){0};
}

/* sum + the dot products of each lane's four unsigned bytes of `weights` and four signed bytes of x. */
INLINE vi dot4(int kind, vi sum, vu weights, vi x) {
    (void)kind;
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)x);
#else
    const vu even = weights & 0x00ff00ff, odd = weights >> 8 & 0x00ff00ff;
    const vi x_even = x << 8, x_odd = x; /* the signed byte in the upper half of each 16 bits */
#if defined(__AVX512BW__)
    const __m512i ones = _mm512_set1_epi16(1);
    /* Pairs of products of codes of up to 6 bits fit into 16 bits; of 8 bits they would not. */
    if (kind != Q8_0) return sum + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)weights, (__m512i)x), ones);
    const __m512i even_x = _mm512_srai_epi16((__m512i)x_even, 8), odd_x = _mm512_srai_epi16((__m512i)x_odd, 8);
    return sum + (vi)_mm512_madd_epi16((__m512i)even, even_x) + (vi)_mm512_madd_epi16((__m512i)odd, odd_x);
#elif defined(__AVX2__)
    const __m256i ones = _mm256_set1_epi16(1);
    if (kind != Q8_0) return sum + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)weights, (__m256i)x), ones);
    const __m256i even_x = _mm256_srai_epi16((__m256i)x_even, 8), odd_x = _mm256_srai_epi16((__m256i)x_odd, 8);
    return sum + (vi)_mm256_madd_epi16((__m256i)even, even_x) + (vi)_mm256_madd_epi16((__m256i)odd, odd_x);
#elif defined(__SSE2__)
    const __m128i even_x = _mm_srai_epi16((__m128i)x_even, 8), odd_x = _mm_srai_epi16((__m128i)x_odd, 8);
    return sum + (vi)_mm_madd_epi16((__m128i)even, even_x) + (vi)_mm_madd_epi16((__m128i)odd, odd_x);
#else
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) sum += (vi)(weights >> 8 * i & 255) * (x << (24 - 8 * i) >> 24);
    return sum;
#endif
#endif
}

/* What one sub of inputs adds to a sum, given its sum of integers. One expression for all shapes of work, so that they round
 * alike. `sub` counts from the row's start. */
INLINE vf add_sub(int kind, vf acc, vi dot, vf scale, vf minimum, const quantized_row *x, long sub) {
    const vf product = __builtin_convertvector(dot, vf) * scale;
    acc += product * x->scales[sub * kind_sub(kind) / RUN];
    if (has_minima(kind)) acc += minimum * (kind_sub(kind) == 16 ? x->sums16 : x->sums32)[sub];
    return acc;
}

/* What a sum of integers starts from: a code's offset times the codes of x. */
INLINE vi first_dot(int kind, const quantized_row *x, long sub, int offset_bits) {
    if (has_minima(kind)) return (vi){0};
    return splat_word((kind_sub(kind) == 16 ? x->negated16 : x->negated32) + sub) << offset_bits;
}

/* Kinds that are the same work once they are unpacked, but for the offset: one of them stands for all. */
INLINE int kind_class(int kind) {
    if (has_minima(kind)) return kind_sub(kind) == 16 ? Q2_K : Q4_K;
    return kind_sub(kind) == 16 ? Q6_K : kind == Q8_0 ? Q8_0 : Q4_0;
}

INLINE void store_with_bias(float *to, vf sum, const float *bias) {
    if (bias) sum += load(bias);
    store(to, sum);
}

/* How far ahead of the reads of few rows memory is called into the cache: into L1 where that is large, and else into L2.
 * 0: the processor's own prefetching is better left alone, which follows blocks of 32 inputs where little is computed
 * between two reads. Measured on Zen 4 and, with a large L1, on Zen 5. */
INLINE long bytes_ahead(int kind, int rows, int large_l1) {
    if (large_l1) return 8192;
    if (kind_block(kind) == 256) return rows <= 2 ? 4 * block_bytes(kind) : 8192;
    if (rows == 1) return kind == Q8_0 ? 4096 : 0;
    return rows == 2 && kind_bits(kind) != 5 ? 0 : 8192;
}

/* `rows` (a constant) over one panel, straight from its packed blocks: nearly all of the work is reading and unpacking them,
 * once for all rows. What lies ahead is called into the cache, a share with each run, since a burst out of memory would fill
 * all buffers. One or two rows of large blocks wait for memory alone: with a small L1 the next block is called on into it
 * from L2, in a burst. `large_l1` is a constant, too: tested in the loop it would cost a tenth.
 * The vectors of a run are worked through together, as they lie in memory, but for a single row of large blocks. */
INLINE void few_rows_quantized(int kind, int rows, int large_l1, const char *block, const quantized_row *x, long k,
                               const float *bias, float *out, long out_stride) {
    const int groups = kind_sub(kind) / GROUP, is_large = kind_block(kind) == 256, together = is_large && rows == 1 ? 1 : NV;
    const long ahead = bytes_ahead(kind, rows, large_l1);
    vf acc[QUANTIZED_ROWS][NV];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < NV; j++) acc[r][j] = (vf){0};
    for (long at = 0; at < k; at += kind_block(kind), block += block_bytes(kind)) {
        for (long line = 0; line < block_bytes(kind) && is_large && rows <= 2 && !large_l1; line += 64)
            __builtin_prefetch(block + block_bytes(kind) + line);
        for (long run = 0; run < kind_block(kind) / RUN; run++) {
            const long share = block_bytes(kind) / (kind_block(kind) / RUN);
            const char *next = block + ahead + run * share;
            for (long line = 0; line < share && ahead; line += 64)
                if (large_l1) __builtin_prefetch(next + line, 0, 3);
                else __builtin_prefetch(next + line, 0, 2);
            const uint32_t *codes = block_codes(kind, block, run);
#pragma GCC unroll 2
            for (int part = 0; part < RUN / kind_sub(kind); part++) {
                const long sub = run * RUN / kind_sub(kind) + part, x_sub = at / kind_sub(kind) + sub;
#pragma GCC unroll 8
                for (int first = 0; first < NV; first += together) {
                    vi dot[QUANTIZED_ROWS][NV];
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                        for (int j = first; j < first + together; j++)
                            dot[r][j] = first_dot(kind, &x[r], x_sub, kind_offset_bits(kind));
#pragma GCC unroll 8
                    for (int g = part * groups; g < (part + 1) * groups; g++)
#pragma GCC unroll 8
                        for (int j = first; j < first + together; j++) {
                            const vu words = code_group(kind, codes, g, j);
#pragma GCC unroll 8
                            for (int r = 0; r < rows; r++)
                                dot[r][j] = dot4(kind, dot[r][j], words, splat_word(x[r].codes + at + run * RUN + g * GROUP));
                        }
#pragma GCC unroll 8
                    for (int j = first; j < first + together; j++) {
                        const vf scale = sub_scale(kind, block, sub, j);
                        const vf minimum = has_minima(kind) ? sub_minimum(kind, block, sub, j) : (vf){0};
#pragma GCC unroll 8
                        for (int r = 0; r < rows; r++)
                            acc[r][j] = add_sub(kind, acc[r][j], dot[r][j], scale, minimum, &x[r], x_sub);
                    }
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < NV; j++)
            store_with_bias(out + r * out_stride + j * VL, acc[r][j], bias ? bias + j * VL : NULL);
}

/* Some inputs of a panel with a byte a code and scales in float32, which stay in L1 while rows pass over them. */
typedef struct {
    _Alignas(64) uint32_t groups[QUANTIZED_DEPTH / GROUP][NR];
    float scale[QUANTIZED_DEPTH / 16][NR], minimum[QUANTIZED_DEPTH / 16][NR];
} unpacked_panel;

INLINE void unpack_panel(int kind, const char *panel, long k, long depth, unpacked_panel *to) {
    for (long at = 0; at < depth; at += RUN) {
        const char *block = panel + (k + at) / kind_block(kind) * block_bytes(kind);
        const long first = (k + at) % kind_block(kind);
        const uint32_t *codes = block_codes(kind, block, first / RUN);
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) {
#pragma GCC unroll 8
            for (int g = 0; g < RUN / GROUP; g++) *(vu *)(to->groups[at / GROUP + g] + j * VL) = code_group(kind, codes, g, j);
#pragma GCC unroll 2
            for (long sub = 0; sub < RUN / kind_sub(kind); sub++) {
                const long s = at / kind_sub(kind) + sub, in_block = first / kind_sub(kind) + sub;
                store(to->scale[s] + j * VL, sub_scale(kind, block, in_block, j));
                if (has_minima(kind)) store(to->minimum[s] + j * VL, sub_minimum(kind, block, in_block, j));
            }
        }
    }
}

/* `rows` (a constant) of x from input k on, over depth inputs of an unpacked panel. */
INLINE void quantized_tile(int kind, int rows, const unpacked_panel *panel, const quantized_row *x, long k, long depth,
                           int offset_bits, const float *bias, float *c, long c_stride) {
    const int groups = kind_sub(kind) / GROUP;
    vf acc[QUANTIZED_ROWS][NV];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) acc[r][j] = k > 0 ? load(c + r * c_stride + j * VL) : (vf){0};
    for (long sub = 0; sub < depth / kind_sub(kind); sub++) {
        const long x_sub = k / kind_sub(kind) + sub;
        vi dot[QUANTIZED_ROWS][NV];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int j = 0; j < NV; j++) dot[r][j] = first_dot(kind, &x[r], x_sub, offset_bits);
#pragma GCC unroll 8
        for (int g = 0; g < groups; g++) {
            vu words[NV];
#pragma GCC unroll 8
            for (int j = 0; j < NV; j++) words[j] = *(const vu *)(panel->groups[sub * groups + g] + j * VL);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const vi x_word = splat_word(x[r].codes + (x_sub * groups + g) * GROUP);
#pragma GCC unroll 8
                for (int j = 0; j < NV; j++) dot[r][j] = dot4(kind, dot[r][j], words[j], x_word);
            }
        }
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) {
            const vf scale = load(panel->scale[sub] + j * VL);
            const vf minimum = has_minima(kind) ? load(panel->minimum[sub] + j * VL) : (vf){0};
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) acc[r][j] = add_sub(kind, acc[r][j], dot[r][j], scale, minimum, &x[r], x_sub);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++)
            store_with_bias(c + r * c_stride + j * VL, acc[r][j], bias ? bias + j * VL : NULL);
}

#endif
