/* Vectors of float32 in the width of the ISA this file is compiled for, by GCC's and Clang's vector extensions, so that
 * AVX-512, AVX2, NEON and SSE share one source. Every kernel file is compiled once per ISA, with QUIRE_ISA its name. */
#ifndef QUIRE_SIMD_H
#define QUIRE_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define QUIRE_PASTE(isa, name) quire_##isa##_##name
#define QUIRE_PASTE2(isa, name) QUIRE_PASTE(isa, name)
#define EXPORT(name) QUIRE_PASTE2(QUIRE_ISA, name)
#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* VL floats a vector; a register tile is up to MR rows by NR columns, which leaves room for operands:
 * 24 of 32 registers with AVX-512 and NEON, 12 of 16 with AVX2 and SSE. */
#if defined(__AVX512F__)
enum { VL = 16, MR = 12, NR = 32 };
#elif defined(__AVX2__)
enum { VL = 8, MR = 6, NR = 16 };
#elif defined(__aarch64__)
enum { VL = 4, MR = 6, NR = 16 };
#else
enum { VL = 4, MR = 3, NR = 16 };
#endif
enum { NV = NR / VL };

#if defined(__AVX512F__)
#define VECTOR(type) __attribute__((vector_size(16 * sizeof(type)), aligned(sizeof(type)), may_alias))
#elif defined(__AVX2__)
#define VECTOR(type) __attribute__((vector_size(8 * sizeof(type)), aligned(sizeof(type)), may_alias))
#else
#define VECTOR(type) __attribute__((vector_size(4 * sizeof(type)), aligned(sizeof(type)), may_alias))
#endif
typedef float vf VECTOR(float);
typedef int32_t vi VECTOR(int32_t);
typedef uint32_t vu VECTOR(uint32_t);
typedef uint16_t vh VECTOR(uint16_t);
typedef int8_t vb VECTOR(int8_t);
typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));

/* How weights and KV are stored; from Q4_0 on as a GGUF file packs weights, see quantized.h. */
enum kind { F32, BF16, F16, I8, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K };

INLINE long kind_bytes(int kind) { return kind == F32 ? 4 : kind == I8 ? 1 : 2; }
INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf x) { *(vf *)p = x; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf as_float(vi x) { return (vf)x; }
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
/* a > b ? a : b, and a < b ? a : b: b where one of them is NaN. */
#if defined(__AVX512F__)
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
INLINE vf vmax(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE vf vmax(vf a, vf b) { return pick(a > b, a, b); }
INLINE vf vmin(vf a, vf b) { return pick(a < b, a, b); }
#endif

INLINE float half_to_float(uint16_t h) {
    uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13, bits;
    float f;
    memcpy(&f, &magnitude, 4);
    f *= 0x1p112f; /* the exponents' biases differ by 112; exact, subnormals included */
    memcpy(&bits, &f, 4);
    if (magnitude >= 0x0f800000) bits |= 0x7f800000; /* infinity and NaN */
    bits |= (uint32_t)(h & 0x8000) << 16;
    memcpy(&f, &bits, 4);
    return f;
}

/* VL stored numbers as float32; `at` counts elements. By intrinsics where there are: compilers take the portable
 * conversions apart, lane by lane. */
INLINE vf load_wide(int kind, const void *p, long at) {
    if (kind == F32) return load((const float *)p + at);
    const uint16_t *h = (const uint16_t *)p + at;
    const int8_t *b = (const int8_t *)p + at;
#if defined(__AVX512F__)
    if (kind == I8) return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)b)));
    const __m256i bits = _mm256_loadu_si256((const __m256i *)h);
    if (kind == BF16) return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
    return (vf)_mm512_cvtph_ps(bits);
#elif defined(__AVX2__)
    if (kind == I8) return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)b)));
    const __m128i bits = _mm_loadu_si128((const __m128i *)h);
    if (kind == BF16) return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
    return (vf)_mm256_cvtph_ps(bits);
#else
    if (kind == I8) return __builtin_convertvector(__builtin_convertvector(*(const vb *)b, vi), vf);
    const vu bits = __builtin_convertvector(*(const vh *)h, vu);
    if (kind == BF16) return (vf)(bits << 16);
    const vu magnitude = (bits & 0x7fff) << 13, special = (vu)((vi)magnitude >= 0x0f800000) & 0x7f800000;
    return (vf)((vu)((vf)magnitude * 0x1p112f) | special | (bits & 0x8000) << 16);
#endif
}

INLINE float load_one(int kind, const void *p, long at) {
    if (kind == F32) return ((const float *)p)[at];
    if (kind == F16) return half_to_float(((const uint16_t *)p)[at]);
    const uint32_t bits = (uint32_t)((const uint16_t *)p)[at] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE uint16_t float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1); /* to nearest, ties to even */
    return (uint16_t)((x != x ? bits | 0x400000 : rounded) >> 16);
}

INLINE uint16_t float_to_half(float x) {
#if defined(__F16C__)
    return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t bits, sign, rounded;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00); /* NaN */
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds past 65504 */
    if (bits < 0x38800000) { /* subnormal: let an addition round at the right bit */
        float f;
        memcpy(&f, &bits, 4);
        f += 0.5f;
        memcpy(&rounded, &f, 4);
        return (uint16_t)(sign | (rounded - 0x3f000000));
    }
    rounded = bits + 0xfff + (bits >> 13 & 1) - (112u << 23);
    return (uint16_t)(sign | rounded >> 13);
#endif
}

/* The lanes of a vector as one: the upper half's with the lower half's, until one is left. On every ISA in the same order. */
#if defined(__AVX2__)
#define DEFINE_LANES(name, with)                                                                                       \
    INLINE float name(vf x) {                                                                                          \
        const __m256 eight = EIGHT_OF(x, with);                                                                        \
        const __m128 four = _mm_##with##_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));           \
        const __m128 two = _mm_##with##_ps(four, _mm_movehl_ps(four, four));                                           \
        return _mm_cvtss_f32(_mm_##with##_ss(two, _mm_movehdup_ps(two)));                                              \
    }
#if defined(__AVX512F__)
#define UPPER(x) _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)(x)), 1))
#define EIGHT_OF(x, with) _mm256_##with##_ps(_mm512_castps512_ps256((__m512)(x)), UPPER(x))
#else
#define EIGHT_OF(x, with) ((__m256)(x))
#endif
DEFINE_LANES(sum_lanes, add)
DEFINE_LANES(max_lanes, max)
#else
INLINE float sum_lanes(vf x) {
    float s[VL];
    store(s, x);
    for (int width = VL / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
}

INLINE float max_lanes(vf x) {
    float s[VL];
    store(s, x);
    for (int width = VL / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) s[i] = MAX(s[i], s[i + width]);
    return s[0];
}
#endif

INLINE int32_t sum_whole_lanes(vi x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    for (int i = 0; i < VL; i++) sum += x[i];
    return sum;
#endif
}

/* exp to 2 units in the last place: 2^n times a polynomial on [-ln2/2, ln2/2]. Arguments below -87.3 give 1e-38, above
 * 88.7 infinity's neighbour: both ends of what softmax and sigmoids ask for. NaN stays NaN. */
INLINE vf vexp(vf x) {
    x = vmin(splat(88.7f), vmax(splat(-87.3f), x));
    vf shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the sum's low bits are the rounded integer */
    vf n = shifted - 12582912.0f;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f; /* ln 2 in two parts */
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    /* 2^n in two factors, for n = 128 has no float of its own. */
    vi e = (vi)shifted - 0x4b400000, half = e >> 1;
    return p * (vf)((half + 127) << 23) * (vf)((e - half + 127) << 23);
#endif
}

INLINE vf vtanh(vf x) {
    vf square = x * x;
    vf small = x + x * square * (-0.333333333f + square * (0.133333333f + square * (-0.0539682540f + square * 0.0218694885f)));
    vf large = 1.0f - 2.0f / (vexp(x + x) + 1.0f); /* loses its digits near 0, where the series is exact enough */
    return pick((square < 0.04f), small, large);
}

/* x / 2 * (1 + erf(x / sqrt 2)), by Abramowitz and Stegun 7.1.26: erf to 1.5e-7. */
INLINE vf vgelu(vf x) {
    const vf a = vmax(x, -x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * a);
    vf p = splat(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const vf tail = 0.5f * p * t * vexp(-a * a); /* half of what erf lacks to 1 */
    return x * pick(x < 0.0f, tail, 1.0f - tail);
}

/* As kernels/cpu/weight.py numbers them. */
enum activation { SILU, GELU_TANH, GELU, RELU, CLAMPED_SILU };

/* gelu's tanh form is x * sigmoid(2u), as silu is x * sigmoid(x): one exponential serves both. */
INLINE vf activate(vf x, int activation) {
    if (activation == GELU) return vgelu(x);
    if (activation == RELU) return vmax(x, (vf){0});
    vf u = x;
    if (activation == GELU_TANH) u *= 1.5957691216f + 0.0713548162726f * x * x; /* 2 sqrt(2 / pi), and that times 0.044715 */
    if (activation == CLAMPED_SILU) {
        x = vmin(x, splat(7.0f));
        u = 1.702f * x;
    }
    return x / (1.0f + vexp(-u));
}

/* What an MLP multiplies its activated gate by: gpt-oss's is clamped, too, and 1 more. */
INLINE vf gated(vf up, int activation) {
    if (activation == CLAMPED_SILU) up = vmax(vmin(up, splat(7.0f)), splat(-7.0f)) + 1.0f;
    return up;
}

#endif
