/* Weights as a GGUF file packs them, in panels of NR outputs. A weight is (code - offset) * scale + minimum, where a scale
 * and a minimum serve `kind_sub` inputs. A panel is one stream of blocks of `kind_block` inputs:
 *
 *     uint16_t d[NR]; uint16_t m[NR] (kinds with minima);                          both float16
 *     int8_t scale[block / sub][NR]; uint8_t minimum[block / sub][NR] (likewise);  kinds of 256 inputs: times d and m
 *     uint32_t codes[block / 32][bits][NR]
 *
 * which is what the file takes, or a thirtieth more: 4-bit and 6-bit scales have a byte each here (Q2_K: a fifth more).
 * The codes of 32 inputs are eight groups of four; a word holds a group of one output, one code a byte, or parts of
 * several groups: see code_group. */
#ifndef QUIRE_QUANTIZED_H
#define QUIRE_QUANTIZED_H

#include "simd.h"

enum { RUN = 32, GROUP = 4 }; /* inputs that share a scale of activations; inputs of one word */

INLINE int is_quantized(int kind) { return kind >= Q4_0; }
INLINE int kind_block(int kind) { return kind >= Q2_K ? 256 : 32; }
INLINE int kind_sub(int kind) { return kind == Q2_K || kind == Q3_K || kind == Q6_K ? 16 : 32; }
INLINE int kind_bits(int kind) {
    return kind == Q8_0 ? 8 : kind == Q6_K ? 6 : kind == Q5_0 || kind == Q5_1 || kind == Q5_K ? 5 : kind == Q3_K ? 3 : kind == Q2_K ? 2 : 4;
}
INLINE int has_minima(int kind) { return kind == Q4_1 || kind == Q5_1 || kind == Q2_K || kind == Q4_K || kind == Q5_K; }
/* Its logarithm to base 2, where there is one. */
INLINE int kind_offset_bits(int kind) { return kind == Q4_0 ? 3 : kind == Q5_0 ? 4 : kind == Q8_0 ? 7 : kind == Q3_K ? 2 : 5; }
INLINE int kind_offset(int kind) { return has_minima(kind) ? 0 : 1 << kind_offset_bits(kind); }

INLINE long subs_of(int kind) { return kind_block(kind) / kind_sub(kind); }
INLINE long halves_bytes(int kind) { return NR * (has_minima(kind) ? 4 : 2); }
INLINE long head_bytes(int kind) {
    return halves_bytes(kind) + (kind_block(kind) == 256 ? subs_of(kind) * NR * (has_minima(kind) ? 2 : 1) : 0);
}
INLINE long run_bytes(int kind) { return 4L * kind_bits(kind) * NR; }
INLINE long block_bytes(int kind) { return head_bytes(kind) + kind_block(kind) / RUN * run_bytes(kind); }

INLINE uint16_t *block_halves(const char *block) { return (uint16_t *)block; }
INLINE int8_t *block_scales(int kind, const char *block) { return (int8_t *)block + halves_bytes(kind); }
INLINE uint8_t *block_minima(int kind, const char *block) { return (uint8_t *)block_scales(kind, block) + subs_of(kind) * NR; }
INLINE const uint32_t *block_codes(int kind, const char *block, long run) {
    return (const uint32_t *)(block + head_bytes(kind) + run * run_bytes(kind));
}

INLINE vf bytes_as_float(const void *p, int is_signed) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(p);
    return (vf)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(p);
    return (vf)_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    vf x;
    for (int i = 0; i < VL; i++) x[i] = is_signed ? ((const int8_t *)p)[i] : ((const uint8_t *)p)[i];
    return x;
#endif
}

/* The scale of VL outputs from j * VL on, for the sub-th `kind_sub` inputs of a block. */
INLINE vf sub_scale(int kind, const char *block, long sub, int j) {
    const vf d = load_wide(F16, block_halves(block), j * VL);
    if (kind_block(kind) != 256) return d;
    return d * bytes_as_float(block_scales(kind, block) + sub * NR + j * VL, 1);
}

INLINE vf sub_minimum(int kind, const char *block, long sub, int j) {
    const vf m = load_wide(F16, block_halves(block) + NR, j * VL);
    if (kind_block(kind) != 256) return m;
    return -m * bytes_as_float(block_minima(kind, block) + sub * NR + j * VL, 0);
}

/* Group g of the 32 inputs of `codes`, for VL outputs from j * VL on: a byte a code. Low bits come from words of four or two
 * bits a code, the bits above them from words of one or two. All arguments but `codes` are constants where it is inlined. */
INLINE vu code_group(int kind, const uint32_t *codes, int g, int j) {
#define WORDS(i) (*(const vu *)(codes + (i) * NR + j * VL))
    const int bits = kind_bits(kind);
    if (bits == 8) return WORDS(g);
    if (bits <= 3) {
        const vu low = WORDS(g % 2) >> 2 * (g / 2) & 0x03030303;
        if (bits == 2) return low;
        return low | (WORDS(2) >> g & 0x01010101) << 2;
    }
    const vu low = WORDS(g % 4) >> 4 * (g / 4) & 0x0f0f0f0f;
    if (bits == 4) return low;
    if (bits == 5) return low | (WORDS(4) >> g & 0x01010101) << 4;
    return low | (WORDS(4 + g % 2) >> 2 * (g / 2) & 0x03030303) << 4;
#undef WORDS
}

/* The inverse, for one output: groups' words, a byte a code, into the words of a block. */
INLINE void store_groups(int kind, uint32_t *codes, const uint32_t group[RUN / GROUP]) {
    const int bits = kind_bits(kind);
    if (bits == 8) {
        for (int g = 0; g < 8; g++) codes[g * NR] = group[g];
        return;
    }
    uint32_t ones = 0, twos[2] = {0, 0};
    const int low_bits = bits <= 3 ? 2 : 4;
    for (int g = 0; g < 8; g++) {
        ones |= (group[g] >> low_bits & 0x01010101) << g;
        twos[g % 2] |= ((bits == 6 ? group[g] >> 4 : group[g]) & 0x03030303) << 2 * (g / 2);
    }
    if (bits <= 3) {
        codes[0] = twos[0];
        codes[NR] = twos[1];
        if (bits == 3) codes[2 * NR] = ones;
        return;
    }
    for (int g = 0; g < 4; g++) codes[g * NR] = (group[g] & 0x0f0f0f0f) | (group[g + 4] & 0x0f0f0f0f) << 4;
    if (bits == 5) codes[4 * NR] = ones;
    if (bits == 6) {
        codes[4 * NR] = twos[0];
        codes[5 * NR] = twos[1];
    }
}

/* (code - offset) * scale is exact but for Q6_K, which rounds it once as the reference does; so these are the float32 numbers
 * that unpacking the file gives, bit for bit. */
INLINE vf weight_of(int kind, vf code, vf scale, vf minimum) {
    return has_minima(kind) ? code * scale + minimum : (code - (float)kind_offset(kind)) * scale;
}

/* depth inputs of one panel from input k on (whole runs), to float32 in the layout of a plain panel. */
INLINE void widen_quantized(int kind, const char *panel, long k, float *to, long depth) {
    for (long end = k + depth; k < end; k += RUN) {
        const char *block = panel + k / kind_block(kind) * block_bytes(kind);
        const long first = k % kind_block(kind);
        const uint32_t *codes = block_codes(kind, block, first / RUN);
        for (int j = 0; j < NV; j++)
#pragma GCC unroll 8
            for (int g = 0; g < RUN / GROUP; g++) {
                const long sub = (first + g * GROUP) / kind_sub(kind);
                const vf scale = sub_scale(kind, block, sub, j);
                const vf minimum = has_minima(kind) ? sub_minimum(kind, block, sub, j) : (vf){0};
                const vu group = code_group(kind, codes, g, j);
#pragma GCC unroll 4
                for (int i = 0; i < GROUP; i++) {
                    const vf code = __builtin_convertvector((vi)(group >> 8 * i & 255), vf);
                    store(to + (g * GROUP + i) * NR + j * VL, weight_of(kind, code, scale, minimum));
                }
            }
        to += RUN * NR;
    }
}

/* Runs `statement` with `kind` a constant. */
#define FOR_QUANTIZED_KIND(value, statement)                                                                           \
    switch (value) {                                                                                                   \
    case Q4_0: { enum { kind = Q4_0 }; statement; } break;                                                             \
    case Q4_1: { enum { kind = Q4_1 }; statement; } break;                                                             \
    case Q5_0: { enum { kind = Q5_0 }; statement; } break;                                                             \
    case Q5_1: { enum { kind = Q5_1 }; statement; } break;                                                             \
    case Q8_0: { enum { kind = Q8_0 }; statement; } break;                                                             \
    case Q2_K: { enum { kind = Q2_K }; statement; } break;                                                             \
    case Q3_K: { enum { kind = Q3_K }; statement; } break;                                                             \
    case Q4_K: { enum { kind = Q4_K }; statement; } break;                                                             \
    case Q5_K: { enum { kind = Q5_K }; statement; } break;                                                             \
    case Q6_K: { enum { kind = Q6_K }; statement; } break;                                                             \
    }

#endif
