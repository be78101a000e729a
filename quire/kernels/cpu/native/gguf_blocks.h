/* The blocks of a GGUF file, taken apart: codes in the order of the inputs, a byte each, and scales as stored. */
#ifndef QUIRE_GGUF_BLOCKS_H
#define QUIRE_GGUF_BLOCKS_H

#include "quantized.h"

typedef struct {
    uint16_t d, m;
    int8_t scale[16];
    uint8_t minimum[16];
    _Alignas(4) uint8_t codes[256];
} gguf_block;

INLINE long gguf_bytes(int kind) {
    static const uint8_t bytes[] = {18, 20, 22, 24, 34, 84, 110, 144, 176, 210};
    return bytes[kind - Q4_0];
}

INLINE uint16_t half_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

/* 32 inputs: the low nibbles of 16 bytes, then the high ones; a fifth bit of each in four bytes before them. */
INLINE void read_nibbles(const uint8_t *from, const uint8_t *fifth_bits, uint8_t *codes) {
    uint32_t fifth = 0;
    if (fifth_bits) memcpy(&fifth, fifth_bits, 4);
    for (int i = 0; i < 16; i++) {
        codes[i] = (uint8_t)((from[i] & 15) | (fifth >> i & 1) << 4);
        codes[i + 16] = (uint8_t)(from[i] >> 4 | (fifth >> (i + 16) & 1) << 4);
    }
}

/* Eight scales and minima of 6 bits each in 12 bytes: Q4_K, Q5_K. */
INLINE void read_six_bit_scales(const uint8_t *from, gguf_block *to) {
    for (int i = 0; i < 4; i++) {
        to->scale[i] = (int8_t)(from[i] & 63);
        to->minimum[i] = from[i + 4] & 63;
        to->scale[i + 4] = (int8_t)((from[i + 8] & 15) | from[i] >> 6 << 4);
        to->minimum[i + 4] = (uint8_t)(from[i + 8] >> 4 | from[i + 4] >> 6 << 4);
    }
}

INLINE void read_gguf_block(int kind, const uint8_t *from, gguf_block *to) {
    uint8_t *codes = to->codes;
    if (kind_block(kind) == 32) {
        to->d = half_at(from);
        from += 2;
        if (has_minima(kind)) {
            to->m = half_at(from);
            from += 2;
        }
        if (kind == Q8_0) {
            for (int i = 0; i < 32; i++) codes[i] = from[i] ^ 0x80; /* plus 128 */
        } else if (kind_bits(kind) == 5) {
            read_nibbles(from + 4, from, codes);
        } else {
            read_nibbles(from, NULL, codes);
        }
    } else if (kind == Q4_K || kind == Q5_K) {
        to->d = half_at(from);
        to->m = half_at(from + 2);
        read_six_bit_scales(from + 4, to);
        const uint8_t *fifth = from + 16, *low = kind == Q5_K ? from + 48 : from + 16;
        for (int pair = 0; pair < 4; pair++)
            for (int i = 0; i < 32; i++) {
                const uint8_t byte = low[32 * pair + i];
                const int two = kind == Q5_K ? fifth[i] >> 2 * pair : 0;
                codes[64 * pair + i] = (uint8_t)((byte & 15) | (two & 1) << 4);
                codes[64 * pair + 32 + i] = (uint8_t)(byte >> 4 | (two >> 1 & 1) << 4);
            }
    } else if (kind == Q6_K) {
        memcpy(to->scale, from + 192, 16);
        to->d = half_at(from + 208);
        for (int half = 0; half < 2; half++)
            for (int quarter = 0; quarter < 4; quarter++)
                for (int i = 0; i < 32; i++) {
                    const uint8_t byte = from[64 * half + 32 * (quarter % 2) + i], high = from[128 + 32 * half + i];
                    const int low = quarter < 2 ? byte & 15 : byte >> 4;
                    codes[128 * half + 32 * quarter + i] = (uint8_t)(low | (high >> 2 * quarter & 3) << 4);
                }
    } else { /* Q2_K, Q3_K */
        const uint8_t *low = kind == Q2_K ? from + 16 : from + 32, *third = from;
        for (int half = 0; half < 2; half++)
            for (int quarter = 0; quarter < 4; quarter++)
                for (int i = 0; i < 32; i++) {
                    const int high = kind == Q3_K ? third[i] >> (4 * half + quarter) & 1 : 0;
                    codes[128 * half + 32 * quarter + i] = (uint8_t)((low[32 * half + i] >> 2 * quarter & 3) | high << 2);
                }
        if (kind == Q2_K) {
            to->d = half_at(from + 80);
            to->m = half_at(from + 82);
            for (int i = 0; i < 16; i++) {
                to->scale[i] = (int8_t)(from[i] & 15);
                to->minimum[i] = from[i] >> 4;
            }
        } else {
            const uint8_t *scales = from + 96;
            to->d = half_at(from + 108);
            for (int i = 0; i < 16; i++) {
                const int four = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4, two = scales[8 + i % 4] >> 2 * (i / 4) & 3;
                to->scale[i] = (int8_t)((four | two << 4) - 32);
            }
        }
    }
}

#endif
