/* The CUDA libraries as ONNX Runtime's CUDA provider needs them, on a machine without a GPU.
 *
 * The devices are two H200 in name, their memory is the host's, kernels compute nothing, and everything is done at once. What
 * the provider asks of them is real, and counted: launches, matrix products, copies and waits. So numbers that come out
 * of a graph mean nothing, while where its nodes run and what a step costs the host does. `build.py` adds every
 * other function that the provider names, as one that succeeds and does nothing.
 *
 * Declared are only the arguments that are read: callers pass the others in registers or on the stack, unseen.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned x, y, z; } Dim3;

enum { SUCCESS = 0 };
enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE };

/* What was counted, in the order of NAMES in build.py. */
enum { KERNELS, PRODUCTS, UPLOADS, DOWNLOADS, DEVICE_COPIES, HOST_COPIES, FILLS, WAITS, ON_SECOND, NUM_COUNTS };
static long counts[NUM_COUNTS];

static __thread int current; /* device of this thread */

static void count(int what, const char *name) {
  counts[what]++;
  if (current && (what == KERNELS || what == PRODUCTS)) counts[ON_SECOND]++;
  if (getenv("CUDA_STUB_TRACE")) fprintf(stderr, "%d %s\n", what, name);
}

void stub_read(long *into) { memcpy(into, counts, sizeof counts); }

/* Memory. What is the device's is remembered, for the provider asks what an address is. */

enum { MAX_PIECES = 65536 };
static struct { char *begin; size_t size; int is_host; } pieces[MAX_PIECES];
static int num_pieces;

static int reserve(void **address, size_t size, int is_host) {
  char *memory = NULL;
  if (num_pieces == MAX_PIECES || posix_memalign((void **)&memory, 256, size ? size : 1)) return 2; /* out of memory */
  memset(memory, 0, size);
  pieces[num_pieces].begin = memory;
  pieces[num_pieces].size = size;
  pieces[num_pieces++].is_host = is_host;
  *address = memory;
  return SUCCESS;
}

static int release(void *address) {
  for (int i = 0; i < num_pieces; i++)
    if (pieces[i].begin == address) {
      free(address);
      pieces[i] = pieces[--num_pieces];
      break;
    }
  return SUCCESS;
}

int cudaMalloc(void **address, size_t size) { return reserve(address, size, 0); }
int cudaMallocFromPoolAsync(void **address, size_t size) { return reserve(address, size, 0); }
int cudaMallocHost(void **address, size_t size) { return reserve(address, size, 1); }
int cudaHostAlloc(void **address, size_t size) { return reserve(address, size, 1); }
int cudaFree(void *address) { return release(address); }
int cudaFreeAsync(void *address) { return release(address); }
int cudaFreeHost(void *address) { return release(address); }

int cudaMemGetInfo(size_t *available, size_t *total) {
  *total = 141ul << 30;
  *available = 140ul << 30;
  return SUCCESS;
}

struct Pointer { int type, device; void *on_device, *on_host; long reserved[8]; };

int cudaPointerGetAttributes(struct Pointer *found, const void *address) {
  memset(found, 0, sizeof *found);
  found->on_host = (void *)address;
  for (int i = 0; i < num_pieces; i++)
    if (pieces[i].begin <= (char *)address && (char *)address < pieces[i].begin + pieces[i].size) {
      found->type = pieces[i].is_host ? 1 : 2;
      found->on_device = (void *)address;
    }
  return SUCCESS;
}

static void copy(void *to, const void *from, size_t size, int kind, const char *name) {
  static const int counted[] = {HOST_COPIES, UPLOADS, DOWNLOADS, DEVICE_COPIES};
  memmove(to, from, size);
  count(counted[kind & 3], name);
}

int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
  copy(to, from, size, kind, "cudaMemcpy");
  count(WAITS, "cudaMemcpy");
  return SUCCESS;
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind) {
  copy(to, from, size, kind, "cudaMemcpyAsync");
  return SUCCESS;
}

int cudaMemcpy2DAsync(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height,
                      int kind) {
  for (size_t row = 0; row < height; row++) memmove(to + row * to_pitch, from + row * from_pitch, width);
  copy(to, to, 0, kind, "cudaMemcpy2DAsync");
  return SUCCESS;
}

int cudaMemset(void *address, int value, size_t size) {
  memset(address, value, size);
  count(FILLS, "cudaMemset");
  return SUCCESS;
}

int cudaMemsetAsync(void *address, int value, size_t size) {
  memset(address, value, size);
  count(FILLS, "cudaMemsetAsync");
  return SUCCESS;
}

/* Waits. Streams and events are handles that nobody looks into. */

int cudaDeviceSynchronize(void) { return count(WAITS, "cudaDeviceSynchronize"), SUCCESS; }
int cudaStreamSynchronize(void *stream) { return (void)stream, count(WAITS, "cudaStreamSynchronize"), SUCCESS; }
int cudaEventSynchronize(void *event) { return (void)event, count(WAITS, "cudaEventSynchronize"), SUCCESS; }

static int handle(void **made) {
  static char somewhere[256];
  *made = somewhere;
  return SUCCESS;
}

int cudaStreamCreate(void **stream) { return handle(stream); }
int cudaStreamCreateWithFlags(void **stream) { return handle(stream); }
int cudaEventCreate(void **event) { return handle(event); }
int cudaEventCreateWithFlags(void **event) { return handle(event); }
int cudaMemPoolCreate(void **pool) { return handle(pool); }
int cudaLibraryLoadData(void **library) { return handle(library); }
int cudaLibraryGetKernel(void **kernel) { return handle(kernel); }
int cublasCreate_v2(void **library) { return handle(library); }
int cublasLtCreate(void **library) { return handle(library); }
int cudnnCreate(void **library) { return handle(library); }
int cublasLtMatmulDescCreate(void **made) { return handle(made); }
int cublasLtMatmulPreferenceCreate(void **made) { return handle(made); }
int cublasLtMatrixLayoutCreate(void **made) { return handle(made); }
int cublasLtMatrixTransformDescCreate(void **made) { return handle(made); }

int cudaStreamIsCapturing(void *stream, int *status) {
  (void)stream;
  *status = 0;
  return SUCCESS;
}

/* Kernels, which their host functions stand for. */

void **__cudaRegisterFatBinary(void *binary) {
  static void *registered[1];
  return (void)binary, registered;
}

int __cudaGetKernel(const void **kernel, const void *function) {
  *kernel = function;
  return SUCCESS;
}

static struct { Dim3 grid, block; size_t shared; void *stream; } configuration;

unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void *stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.stream = stream;
  return 0;
}

int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void **stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *stream = configuration.stream;
  return SUCCESS;
}

int cudaLaunchKernel(void) { return count(KERNELS, "cudaLaunchKernel"), SUCCESS; }
int __cudaLaunchKernel(void) { return count(KERNELS, "__cudaLaunchKernel"), SUCCESS; }
int cudaLaunchKernelExC(void) { return count(KERNELS, "cudaLaunchKernelExC"), SUCCESS; }
int cudaLaunchCooperativeKernel(void) { return count(KERNELS, "cudaLaunchCooperativeKernel"), SUCCESS; }
int cuLaunchKernel(void) { return count(KERNELS, "cuLaunchKernel"), SUCCESS; }
int cuLaunchKernelEx(void) { return count(KERNELS, "cuLaunchKernelEx"), SUCCESS; }

struct Function {
  size_t static_shared, constant, local;
  int max_threads, registers, ptx, binary, cache, max_dynamic_shared, rest[23];
};

int cudaFuncGetAttributes(struct Function *found) {
  memset(found, 0, sizeof *found);
  found->max_threads = 1024;
  found->registers = 32;
  found->ptx = found->binary = 90;
  found->max_dynamic_shared = 227 << 10;
  return SUCCESS;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) {
  *blocks = 2;
  return SUCCESS;
}

/* Matrix products. */

int cublasSgemm_v2(void) { return count(PRODUCTS, "cublasSgemm"), SUCCESS; }
int cublasGemmEx(void) { return count(PRODUCTS, "cublasGemmEx"), SUCCESS; }
int cublasSgemmBatched(void) { return count(PRODUCTS, "cublasSgemmBatched"), SUCCESS; }
int cublasGemmBatchedEx(void) { return count(PRODUCTS, "cublasGemmBatchedEx"), SUCCESS; }
int cublasSgemmStridedBatched(void) { return count(PRODUCTS, "cublasSgemmStridedBatched"), SUCCESS; }
int cublasGemmStridedBatchedEx(void) { return count(PRODUCTS, "cublasGemmStridedBatchedEx"), SUCCESS; }
int cublasLtMatmul(void) { return count(PRODUCTS, "cublasLtMatmul"), SUCCESS; }
int cublasSgeam(void) { return count(KERNELS, "cublasSgeam"), SUCCESS; }
int cublasScopy_v2(void) { return count(KERNELS, "cublasScopy"), SUCCESS; }
int cublasSscal_v2(void) { return count(KERNELS, "cublasSscal"), SUCCESS; }
int cublasLtMatrixTransform(void) { return count(KERNELS, "cublasLtMatrixTransform"), SUCCESS; }

int cublasGetMathMode(void *library, int *mode) {
  (void)library;
  *mode = 0;
  return SUCCESS;
}

struct Heuristic { char algorithm[64]; size_t workspace; int state; float waves; int reserved[4]; };

int cublasLtMatmulAlgoGetHeuristic(void *library, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, struct Heuristic *found, int *num_found) {
  (void)library, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)wanted;
  memset(found, 0, sizeof *found);
  *num_found = 1;
  return SUCCESS;
}

/* The device. */

struct Properties {
  char name[256], uuid[16], luid[8];
  unsigned luid_node_mask;
  size_t total_memory, shared_per_block;
  int registers_per_block, warp_size;
  size_t pitch;
  int max_threads_per_block, max_threads[3], max_grid[3];
#if CUDA_MAJOR < 13
  int clock_rate;
#endif
  size_t constant;
  int major, minor;
  size_t texture_alignment, texture_pitch_alignment;
#if CUDA_MAJOR < 13
  int device_overlap, multiprocessors, kernel_timeout, integrated, can_map_host, compute_mode, textures[40];
#else
  int multiprocessors, integrated, can_map_host, textures[39];
#endif
  size_t surface_alignment;
  int concurrent_kernels, ecc, pci[3], tcc, async_engines, unified_addressing;
#if CUDA_MAJOR < 13
  int memory_clock_rate;
#endif
  int bus_width, l2_bytes, max_persisting_l2_bytes, max_threads_per_multiprocessor;
  int stream_priorities, global_l1, local_l1;
  size_t shared_per_multiprocessor;
  int registers_per_multiprocessor, managed, is_multi_board, board_group, native_atomics;
#if CUDA_MAJOR < 13
  int double_ratio;
#endif
  int pageable, concurrent_managed, preemption, can_register_host, cooperative;
#if CUDA_MAJOR < 13
  int cooperative_devices;
#endif
  size_t shared_per_block_optin;
};

static int properties(struct Properties *found) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "NVIDIA H200");
  found->major = 9;
  found->minor = 0;
  found->total_memory = 141ul << 30;
  found->shared_per_block = 48 << 10;
  found->shared_per_block_optin = 227 << 10;
  found->shared_per_multiprocessor = 228 << 10;
  found->registers_per_block = found->registers_per_multiprocessor = 65536;
  found->warp_size = 32;
  found->max_threads_per_block = 1024;
  found->max_threads[0] = found->max_threads[1] = 1024;
  found->max_threads[2] = 64;
  found->max_grid[0] = 2147483647;
  found->max_grid[1] = found->max_grid[2] = 65535;
  found->multiprocessors = 132;
  found->max_threads_per_multiprocessor = 2048;
  found->l2_bytes = 50 << 20;
  found->cooperative = found->unified_addressing = found->concurrent_kernels = 1;
  return SUCCESS;
}

int cudaGetDeviceProperties(struct Properties *found) { return properties(found); }
int cudaGetDeviceProperties_v2(struct Properties *found) { return properties(found); }

int cudaDeviceGetAttribute(int *value, int attribute) {
  switch (attribute) {
    case 1: *value = 1024; break;       /* threads of a block */
    case 8: *value = 48 << 10; break;   /* shared memory of a block */
    case 10: *value = 32; break;        /* warp */
    case 16: *value = 132; break;       /* multiprocessors */
    case 38: *value = 50 << 20; break;  /* L2 cache */
    case 39: *value = 2048; break;      /* threads of a multiprocessor */
    case 75: *value = 9; break;         /* compute capability */
    case 76: *value = 0; break;
    case 81: *value = 228 << 10; break; /* shared memory of a multiprocessor */
    case 97: *value = 227 << 10; break; /* shared memory of a block that asks for it */
    case 115: *value = 1; break;        /* memory pools */
    default: *value = 0;
  }
  return SUCCESS;
}

static int one(int *value, int is) {
  *value = is;
  return SUCCESS;
}

int cudaGetDeviceCount(int *found) { return one(found, 2); }
int cudaGetDevice(int *device) { return one(device, current); }
int cudaSetDevice(int device) { return one(&current, device); }
int cudaRuntimeGetVersion(int *version) { return one(version, CUDA_MAJOR * 1000); }
int cudaDriverGetVersion(int *version) { return one(version, CUDA_MAJOR * 1000); }
int cuInit(void) { return SUCCESS; }
int cuDeviceGetCount(int *found) { return one(found, 2); }
int cuDriverGetVersion(int *version) { return one(version, CUDA_MAJOR * 1000); }

static int nothing(void) { return SUCCESS; }

int cudaGetDriverEntryPointByVersion(const char *name, void **function) {
  *function = strstr(name, "cuLaunchKernel") ? (void *)cuLaunchKernel : (void *)nothing;
  return SUCCESS;
}

const char *cudaGetErrorString(int code) { return code ? "an error of the stub" : "no error"; }
const char *cudaGetErrorName(int code) { return code ? "cudaErrorOfTheStub" : "cudaSuccess"; }
const char *cublasGetStatusName(void) { return "CUBLAS_STATUS_OF_THE_STUB"; }
const char *cublasGetStatusString(void) { return "a status of the stub"; }
const char *cudnnGetErrorString(void) { return "a status of the stub"; }
size_t cudnnGetVersion(void) { return 91000; }
