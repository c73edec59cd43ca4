/* Preloaded into the CUDA build of torch: there is one device, of which nothing is used. NCCL groups can be made then,
   with their threads, pipe and recorder; no collective can run. */
int cudaGetDeviceCount(int *count) {
    *count = 1;
    return 0;
}

int cudaGetDevice(int *device) {
    *device = 0;
    return 0;
}
