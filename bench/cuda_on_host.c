/* A CUDA runtime on host memory that computes nothing: memory is the host's, copies are copies,
   kernels are counted. Every call that matters writes its name, a line each, to the file descriptor
   CUDA_ON_HOST. `ort_cuda_host.py` compiles it beside a stub of every other function that the
   provider asks for, which succeeds. */

#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GIB (1UL << 30)
#define KIB 1024

typedef cudaError_t E;

static int capturing;
static long handles = 0x1000;

static void say(const char *what) {
    static int file = -1;
    if (file < 0) {
        const char *number = getenv("CUDA_ON_HOST");
        file = number ? atoi(number) : 0;
    }
    if (file > 0) {
        char line[96];
        size_t size = strlen(what) < sizeof line - 1 ? strlen(what) : sizeof line - 1;
        memcpy(line, what, size);
        line[size] = '\n';
        if (write(file, line, size + 1) < 0) abort();
    }
}

static void *handle(void) { return (void *)(handles += 64); }

static E allocated(void **memory, size_t size, const char *what) {
    say(capturing ? "allocation inside a capture" : what);
    if (posix_memalign(memory, 256, size ? size : 1)) return cudaErrorMemoryAllocation;
    memset(*memory, 0, size);
    return cudaSuccess;
}

static const char *direction(enum cudaMemcpyKind kind) {
    return kind == cudaMemcpyDeviceToDevice   ? "copy on the device"
           : kind == cudaMemcpyHostToDevice   ? "copy to the device"
           : kind == cudaMemcpyDeviceToHost   ? "copy to the host"
                                              : "copy";
}

E cudaMalloc(void **p, size_t n) { return allocated(p, n, "allocation"); }
E cudaMallocHost(void **p, size_t n) { return allocated(p, n, "pinned allocation"); }
E cudaHostAlloc(void **p, size_t n, unsigned f) { return allocated(p, n, "pinned allocation"); }
E cudaMallocFromPoolAsync(void **p, size_t n, cudaMemPool_t pool, cudaStream_t s) {
    return allocated(p, n, "allocation");
}
E cudaFree(void *p) { return free(p), cudaSuccess; }
E cudaFreeHost(void *p) { return free(p), cudaSuccess; }
E cudaFreeAsync(void *p, cudaStream_t s) { return free(p), cudaSuccess; }

E cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) {
    say("wait");
    say(direction(kind));
    return memcpy(to, from, n), cudaSuccess;
}
E cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s) {
    say(direction(kind));
    return memcpy(to, from, n), cudaSuccess;
}
E cudaMemset(void *p, int value, size_t n) { return say("fill"), memset(p, value, n), cudaSuccess; }
E cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s) {
    return say("fill"), memset(p, value, n), cudaSuccess;
}

E cudaDeviceSynchronize(void) { return say("wait"), cudaSuccess; }
E cudaStreamSynchronize(cudaStream_t s) { return say("wait"), cudaSuccess; }
E cudaEventSynchronize(cudaEvent_t e) { return say("wait"), cudaSuccess; }
E cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return say("event"), cudaSuccess; }
E cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) {
    return say("event"), cudaSuccess;
}
E cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { return say("event"), cudaSuccess; }
E cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) {
    return say("function on the host"), cudaSuccess;
}

E cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) {
    return say("launch"), cudaSuccess;
}
E __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) {
    return say("launch"), cudaSuccess;
}
E cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) {
    return say("launch"), cudaSuccess;
}
void **__cudaRegisterFatBinary(void *binary) {
    static void *registered;
    return &registered;
}
E __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    grid->x = grid->y = grid->z = block->x = block->y = block->z = 1;
    *shared = 0;
    *(void **)stream = 0;
    return cudaSuccess;
}

E cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    capturing = 1;
    return say("capture begins"), cudaSuccess;
}
E cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
    capturing = 0;
    *graph = handle();
    return say("capture ends"), cudaSuccess;
}
E cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
E cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) {
    return *e = handle(), cudaSuccess;
}
E cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { return say("graph launch"), cudaSuccess; }

E cudaStreamCreate(cudaStream_t *s) { return *s = handle(), cudaSuccess; }
E cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return *s = handle(), cudaSuccess; }
E cudaEventCreate(cudaEvent_t *e) { return *e = handle(), cudaSuccess; }
E cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { return *e = handle(), cudaSuccess; }
E cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { return *ms = 1, cudaSuccess; }
E cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *p) {
    return *pool = handle(), cudaSuccess;
}

/* A made-up device of compute capability 8.9. */
E cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
E cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
E cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
E cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
E cudaMemGetInfo(size_t *available, size_t *total) {
    *available = 20 * GIB;
    *total = 24 * GIB;
    return cudaSuccess;
}
E cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "host memory");
    p->major = 8;
    p->minor = 9;
    p->totalGlobalMem = 24 * GIB;
    p->multiProcessorCount = 58;
    p->sharedMemPerBlock = 48 * KIB;
    p->sharedMemPerBlockOptin = 99 * KIB;
    p->sharedMemPerMultiprocessor = 100 * KIB;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 1536;
    p->regsPerBlock = 65536;
    p->warpSize = 32;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    return cudaSuccess;
}
E cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor            ? 8
             : attribute == cudaDevAttrComputeCapabilityMinor          ? 9
             : attribute == cudaDevAttrMultiProcessorCount             ? 58
             : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin    ? 99 * KIB
             : attribute == cudaDevAttrMaxThreadsPerBlock              ? 1024
                                                                       : 1;
    return cudaSuccess;
}
E cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->binaryVersion = 89;
    return cudaSuccess;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *f, int threads, size_t shared, unsigned flags) {
    return *blocks = 1, cudaSuccess;
}
E cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    a->type = cudaMemoryTypeDevice;
    return cudaSuccess;
}
const char *cudaGetErrorString(E error) { return "an error of a CUDA runtime on host memory"; }
const char *cudaGetErrorName(E error) { return "cudaErrorOnHost"; }
E cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *value) {
    return *(unsigned long *)value = 0, cudaSuccess;
}
E cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result) {
    return *function = 0, cudaSuccess;
}
E cudaMemcpy2DAsync(
    void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
    enum cudaMemcpyKind kind, cudaStream_t s) {
    say(direction(kind));
    for (size_t row = 0; row < height; row++)
        memcpy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}

/* Products: the other libraries that the provider links. */
E cublasCreate_v2(void **blas) { return *blas = handle(), cudaSuccess; }
E cublasLtCreate(void **blas) { return *blas = handle(), cudaSuccess; }
E cublasGemmEx(void) { return say("launch"), cudaSuccess; }
E cublasGemmStridedBatchedEx(void) { return say("launch"), cudaSuccess; }
E cublasSgemm_v2(void) { return say("launch"), cudaSuccess; }
E cublasSgemmStridedBatched(void) { return say("launch"), cudaSuccess; }
E cublasLtMatmul(void) { return say("launch"), cudaSuccess; }
