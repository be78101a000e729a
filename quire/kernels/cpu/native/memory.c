/* Weights are read from end to end at every step: large pages spare the processor most of its address translation. */
#include <stddef.h>
#include <stdint.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

void quire_advise_large_pages(void *start, int64_t num_bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 4096, first = ((uintptr_t)start + page - 1) / page * page;
    const uintptr_t last = ((uintptr_t)start + (uintptr_t)num_bytes) / page * page;
    if (first < last) madvise((void *)first, last - first, MADV_HUGEPAGE); /* only advice: failing costs speed */
#else
    (void)start, (void)num_bytes;
#endif
}
