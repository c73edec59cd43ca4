/* A libcuda.so.1 for tests: every call is a line in $FAKE_CUDA_LOG. There is one device, and no work is possible. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void note(const char *call) {
    const char *path = getenv("FAKE_CUDA_LOG");
    int fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (fd < 0)
        return;
    char line[64];
    size_t length = strlen(call);
    memcpy(line, call, length);
    line[length] = '\n';
    if (write(fd, line, length + 1) < 0)
        _exit(9);
    close(fd);
}

/* The driver keeps its control device open from cuInit to the end of the process. */
int cuInit(unsigned flags) {
    const char *device = getenv("FAKE_CUDA_DEVICE");
    note("cuInit");
    if (device)
        open(device, O_RDWR | O_CLOEXEC);
    return flags ? 1 : 0;
}

int cuDriverGetVersion(int *version) {
    note("cuDriverGetVersion");
    *version = 13000;
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return 0;
}

int cuDeviceGetCount(int *count) {
    note("cuDeviceGetCount");
    *count = 1;
    return 0;
}
