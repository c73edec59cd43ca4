/* A libnvidia-ml.so.1 for tests: one device, reference-counted as NVML is, with its device file open in between. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1 };
static int users, device = -1;

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

int nvmlInit_v2(void) {
    const char *path = getenv("FAKE_CUDA_DEVICE");
    note("nvmlInit");
    if (users++ == 0 && path)
        device = open(path, O_RDWR | O_CLOEXEC);
    return SUCCESS;
}

int nvmlInit(void) { return nvmlInit_v2(); }

int nvmlShutdown(void) {
    if (users == 0)
        return UNINITIALIZED;
    note("nvmlShutdown");
    if (--users == 0 && device >= 0) {
        close(device);
        device = -1;
    }
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    note("nvmlDeviceGetCount");
    *count = 1;
    return users ? SUCCESS : UNINITIALIZED;
}
