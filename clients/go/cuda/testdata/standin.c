// A stand-in for libcuda that checks how arguments arrive: the ABI's test, without a GPU.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char bytes[64]; } handle_t;

enum { OK = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201 };

static __thread int depth;
static char *memory;
static const size_t size = 1 << 20;

int cuInit(unsigned flags) { memory = calloc(1, size); return flags == 0 ? OK : INVALID_VALUE; }
int cuGetErrorName(int result, const char **name) {
    *name = result == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_INVALID_VALUE";
    return OK;
}
int cuDeviceGetCount(int *count) { *count = 2; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return OK; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, device, 16); return OK; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(uintptr_t)(1000 + device); return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device == 41 ? OK : INVALID_VALUE; }
int cuCtxPushCurrent_v2(void *context) { depth++; return context == (void *)1041 ? OK : INVALID_CONTEXT; }
int cuCtxPopCurrent_v2(void **context) { depth--; *context = (void *)1041; return OK; }

int cuIpcOpenMemHandle_v2(uint64_t *pointer, handle_t handle, unsigned flags) {
    if (!depth) return INVALID_CONTEXT;
    for (int i = 0; i < 64; i++)
        if ((unsigned char)handle.bytes[i] != (unsigned char)(3 * i + 1)) return INVALID_VALUE;
    *pointer = (uint64_t)(uintptr_t)memory;
    return flags == 1 ? OK : INVALID_VALUE;
}
int cuIpcCloseMemHandle(uint64_t pointer) { return depth && pointer == (uint64_t)(uintptr_t)memory ? OK : INVALID_CONTEXT; }
int cuMemGetAddressRange_v2(uint64_t *base, size_t *length, uint64_t pointer) {
    (void)pointer;
    *base = (uint64_t)(uintptr_t)memory;
    *length = size;
    return depth ? OK : INVALID_CONTEXT;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t count, void *stream) {
    memcpy((void *)(uintptr_t)to, from, count);
    return depth && stream == (void *)77 ? OK : INVALID_CONTEXT;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t count, void *stream) {
    memcpy(to, (void *)(uintptr_t)from, count);
    return depth && stream == (void *)77 ? OK : INVALID_CONTEXT;
}
int cuMemHostRegister_v2(void *page, size_t count, unsigned flags) { return depth && page && count && flags == 2 ? OK : INVALID_VALUE; }
int cuMemHostUnregister(void *page) { return depth && page ? OK : INVALID_VALUE; }
int cuMemHostGetDevicePointer_v2(uint64_t *pointer, void *page, unsigned flags) {
    *pointer = (uint64_t)(uintptr_t)page;
    return flags == 0 ? OK : INVALID_VALUE;
}
int cuStreamCreate(void **stream, unsigned flags) { *stream = (void *)77; return depth && flags == 1 ? OK : INVALID_VALUE; }
int cuStreamDestroy_v2(void *stream) { return depth && stream == (void *)77 ? OK : INVALID_VALUE; }
int cuStreamSynchronize(void *stream) { return depth && stream == (void *)77 ? OK : INVALID_VALUE; }
int cuStreamWriteValue64_v2(void *stream, uint64_t at, uint64_t value, unsigned flags) {
    *(volatile uint64_t *)(uintptr_t)at = value;
    return depth && stream == (void *)77 && flags == 0 ? OK : INVALID_VALUE;
}
int cuStreamWaitValue64_v2(void *stream, uint64_t at, uint64_t value, unsigned flags) {
    return depth && stream == (void *)77 && flags == 0 && *(volatile int64_t *)(uintptr_t)at >= (int64_t)value ? OK : INVALID_VALUE;
}
