/* Refuses one allocation of a process: LD_PRELOAD=refusing.so, with PYTHONMALLOC=malloc.

   refuse(0) begins to count allocations; refuse(n) counts and refuses the n-th; counted() ends it
   and says how many there were. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static atomic_int counting;
static atomic_long count, wanted;

void refuse(long n) {
    count = 0;
    wanted = n;
    counting = 1;
}

long counted(void) {
    counting = 0;
    return count;
}

static int refused(void) {
    if (!counting || ++count != wanted)
        return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t size) { return refused() ? NULL : __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return refused() ? NULL : __libc_calloc(n, size); }
void *realloc(void *old, size_t size) { return refused() ? NULL : __libc_realloc(old, size); }
void *memalign(size_t align, size_t size) { return refused() ? NULL : __libc_memalign(align, size); }
void *aligned_alloc(size_t align, size_t size) { return memalign(align, size); }

int posix_memalign(void **out, size_t align, size_t size) {
    if (refused())
        return ENOMEM;
    void *found = __libc_memalign(align, size);
    if (!found)
        return ENOMEM;
    *out = found;
    return 0;
}

void *mmap(void *at, size_t size, int rights, int flags, int fd, off_t offset) {
    if (refused())
        return MAP_FAILED;
    return (void *)syscall(SYS_mmap, at, size, rights, flags, fd, offset);
}
