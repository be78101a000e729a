/* Ranks of one machine: sums, and streams of bytes from one to another, in memory that their processes share.
 *
 * Everything is built from counters, each advanced by one process and waited for by others. Who waits spins for a
 * moment, because the others usually come within microseconds, and then sleeps in the kernel; a sleeper looks from time
 * to time whether the process that it waits for still lives. */
#if defined(__linux__)
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SPIN_NANOSECONDS = 100 * 1000, SPINS_PER_YIELD = 64, LOOK_NANOSECONDS = 200 * 1000 * 1000 };
enum { MAX_RANKS = 64, ROOM_FLOATS = 1 << 16, STRIP_FLOATS = 1024, TWO_SHOT_FLOATS = 1 << 13 };

/* Counts modulo 2^32: two of one counter are never 2^31 apart. */
struct counter {
    _Alignas(64) atomic_uint value;
    atomic_int sleepers;
};

static long now_nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void advance(struct counter *counter, unsigned value) {
    atomic_store(&counter->value, value);
    if (atomic_load(&counter->sleepers) > 0) syscall(SYS_futex, &counter->value, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

/* Until the counter is at `value` or past it. False if the process that advances it is gone. */
static int await(struct counter *counter, unsigned value, pid_t owner) {
    long deadline = 0;
    for (unsigned spins = 1;; spins++) {
        if ((int)(atomic_load_explicit(&counter->value, memory_order_acquire) - value) >= 0) return 1;
        if (spins % SPINS_PER_YIELD == 0) {
            long now = now_nanoseconds();
            if (deadline == 0) deadline = now + SPIN_NANOSECONDS;
            if (now >= deadline) break;
            sched_yield(); /* the other rank may be waiting for this very core */
        }
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
    }
    int is_there = 1;
    atomic_fetch_add(&counter->sleepers, 1);
    for (;;) {
        unsigned seen = atomic_load(&counter->value);
        if ((int)(seen - value) >= 0) break;
        struct timespec look = {0, LOOK_NANOSECONDS};
        long status = syscall(SYS_futex, &counter->value, FUTEX_WAIT, seen, &look, NULL, 0);
        if (status != 0 && errno == ETIMEDOUT && kill(owner, 0) != 0 && errno == ESRCH) {
            is_there = (int)(atomic_load(&counter->value) - value) >= 0;
            break;
        }
    }
    atomic_fetch_sub(&counter->sleepers, 1);
    return is_there;
}

/* A sum's memory: counters and processes by rank, then two rooms for each rank, which calls use in turn. A rank that
 * writes to one again has heard from everybody in the call between, so that nobody reads it any more. */
struct sums {
    struct counter written[MAX_RANKS];
    struct counter summed[MAX_RANKS];
    _Alignas(64) int32_t processes[MAX_RANKS];
    _Alignas(64) float rooms[];
};

int64_t quire_sums_bytes(int num_ranks) {
    return (int64_t)sizeof(struct sums) + (int64_t)num_ranks * 2 * ROOM_FLOATS * (int64_t)sizeof(float);
}

void quire_sums_join(struct sums *sums, int rank) { sums->processes[rank] = (int32_t)getpid(); }

static float *room_of(struct sums *sums, int rank, unsigned call) {
    return sums->rooms + ((int64_t)rank * 2 + call % 2) * ROOM_FLOATS;
}

/* 0, or 1 + the rank that is gone. */
static int await_all(struct sums *sums, struct counter *counters, int rank, int num_ranks, unsigned call) {
    for (int peer = 0; peer < num_ranks; peer++)
        if (peer != rank && !await(&counters[peer], call, sums->processes[peer])) return 1 + peer;
    return 0;
}

/* In the order of ranks, so that all have the same bits. */
static void sum_rooms(struct sums *sums, int num_ranks, unsigned call, int64_t first, int64_t last, float *out) {
    for (int64_t start = first; start < last; start += STRIP_FLOATS) {
        const int64_t count = last - start < STRIP_FLOATS ? last - start : STRIP_FLOATS;
        float total[STRIP_FLOATS];
        memcpy(total, room_of(sums, 0, call) + start, (size_t)count * sizeof *total);
        for (int peer = 1; peer < num_ranks; peer++) {
            const float *theirs = room_of(sums, peer, call) + start;
            for (int64_t i = 0; i < count; i++) total[i] += theirs[i];
        }
        memcpy(out + start, total, (size_t)count * sizeof *total);
    }
}

/* x[count] of every rank, summed in place. 0, or 1 + the rank that is gone. */
int quire_sums_add(struct sums *sums, int rank, int num_ranks, float *x, int64_t count) {
    unsigned call = atomic_load_explicit(&sums->written[rank].value, memory_order_relaxed);
    for (int64_t start = 0; start < count; start += ROOM_FLOATS, x += ROOM_FLOATS) {
        const int64_t length = count - start < ROOM_FLOATS ? count - start : ROOM_FLOATS;
        float *own = room_of(sums, rank, ++call);
        memcpy(own, x, (size_t)length * sizeof *x);
        advance(&sums->written[rank], call);
        int gone = await_all(sums, sums->written, rank, num_ranks, call);
        if (gone) return gone;
        if (num_ranks == 2 || length < TWO_SHOT_FLOATS) { /* one shot: everybody sums everything */
            sum_rooms(sums, num_ranks, call, 0, length, x);
            advance(&sums->summed[rank], call);
            continue;
        }
        /* Two shots: everybody sums a part, where nobody else reads its own values, and then reads the others' sums. */
        sum_rooms(sums, num_ranks, call, length * rank / num_ranks, length * (rank + 1) / num_ranks, own);
        advance(&sums->summed[rank], call);
        gone = await_all(sums, sums->summed, rank, num_ranks, call);
        if (gone) return gone;
        for (int peer = 0; peer < num_ranks; peer++) {
            const int64_t first = length * peer / num_ranks, last = length * (peer + 1) / num_ranks;
            memcpy(x + first, room_of(sums, peer, call) + first, (size_t)(last - first) * sizeof *x);
        }
    }
    return 0;
}

/* Bytes from one process to another, through a ring. */
enum { RING_BYTES = 4 << 20 };

struct stream {
    struct counter sent, received;
    _Alignas(64) int32_t sender, receiver;
    _Alignas(64) char ring[RING_BYTES];
};

int64_t quire_stream_bytes(void) { return (int64_t)sizeof(struct stream); }

void quire_stream_join(struct stream *stream, int sends) {
    *(sends ? &stream->sender : &stream->receiver) = (int32_t)getpid();
}

/* Waits while the ring is full. False if the receiver is gone. */
int quire_stream_send(struct stream *stream, const char *from, int64_t num_bytes) {
    unsigned at = atomic_load_explicit(&stream->sent.value, memory_order_relaxed);
    while (num_bytes > 0) {
        unsigned room = RING_BYTES - (at - atomic_load_explicit(&stream->received.value, memory_order_acquire));
        if (room == 0) {
            if (!await(&stream->received, at - RING_BYTES + 1, stream->receiver)) return 0;
            continue;
        }
        const unsigned place = at % RING_BYTES;
        unsigned length = RING_BYTES - place < room ? RING_BYTES - place : room;
        if (num_bytes < length) length = (unsigned)num_bytes;
        memcpy(stream->ring + place, from, length);
        advance(&stream->sent, at += length);
        from += length, num_bytes -= length;
    }
    return 1;
}

/* False if the sender is gone. */
int quire_stream_receive(struct stream *stream, char *into, int64_t num_bytes) {
    unsigned at = atomic_load_explicit(&stream->received.value, memory_order_relaxed);
    while (num_bytes > 0) {
        unsigned there = atomic_load_explicit(&stream->sent.value, memory_order_acquire) - at;
        if (there == 0) {
            if (!await(&stream->sent, at + 1, stream->sender)) return 0;
            continue;
        }
        const unsigned place = at % RING_BYTES;
        unsigned length = RING_BYTES - place < there ? RING_BYTES - place : there;
        if (num_bytes < length) length = (unsigned)num_bytes;
        memcpy(into, stream->ring + place, length);
        advance(&stream->received, at += length);
        into += length, num_bytes -= length;
    }
    return 1;
}
#endif
