/* What a rank on a GPU does outside of Python, for a test without one: it waits asleep or spinning, without the GIL,
   beside a thread that polls as NCCL's proxy does. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <time.h>

static void *poll_device(void *name) {
    pthread_setname_np(pthread_self(), name);
    for (;;)
        sched_yield();
}

int start_proxy(const char *name) {
    pthread_t thread;
    return pthread_create(&thread, 0, poll_device, (void *)name);
}

void wait_asleep(void) {
    struct timespec forever = {1000000, 0};
    nanosleep(&forever, 0);
}

void wait_spinning(void) {
    for (;;)
        sched_yield();
}
