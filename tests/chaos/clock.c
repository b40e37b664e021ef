/* A wall clock that can be stepped: a preloaded library that adds an offset from a file to the time of day.
 *
 * PENSTOCK_CHAOS_CLOCKS is the folder, PENSTOCK_CHAOS_CLOCK the file in it (by default the name of the program). The file
 * has the offset in seconds as one 64-bit integer and may change at any time; without a file the offset is zero. Monotonic
 * clocks do not change, as when an administrator or NTP sets the clock of a machine.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *step;

__attribute__((constructor)) static void find(void) {
    const char *folder = getenv("PENSTOCK_CHAOS_CLOCKS"), *name = getenv("PENSTOCK_CHAOS_CLOCK");
    char path[4096];
    if (!folder || snprintf(path, sizeof path, "%s/%s", folder, name ? name : program_invocation_short_name) >= (int)sizeof path)
        return;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof *step, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED)
        step = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    /* The function of libc needs no system call. Before it can be resolved, in constructors of other libraries, use the
     * system call. */
    static int (*own)(clockid_t, struct timespec *);
    if (!own)
        own = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = own ? own(clock, now) : (int)syscall(SYS_clock_gettime, clock, now);
    if (!status && step && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *step;
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact))
        return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now)
        *now = exact.tv_sec;
    return exact.tv_sec;
}
