/* How keys and values lie in a block of one layer: kv[block][2][kv_heads], then block_size * head_dim numbers, which are
 *
 *     of values, rows      [block_size][head_dim]
 *     of keys, panels      [block_size / KEY_PANEL][head_dim][KEY_PANEL]        (smaller blocks are one panel)
 *
 * so that a vector has the same element of neighbouring keys. Decodes and prompts then both sum a score along the head, in
 * order, in one lane: neither transposes a key, and both give the same bits. */
#ifndef QUIRE_KV_H
#define QUIRE_KV_H

#include "simd.h"

enum { KEY_PANEL = 16 };

INLINE long panel_keys(long block_size) { return MIN(block_size, KEY_PANEL); }

/* Where element 0 of a key lies in its head's part of a block; the others follow at distances of panel_keys. */
INLINE long key_at(long block_size, long head_dim, long offset) {
    const long lane = offset % panel_keys(block_size);
    return (offset - lane) * head_dim + lane;
}

#endif
