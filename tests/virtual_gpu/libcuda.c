// A libcuda.so.1 for Triton's own driver and launcher on a machine without a GPU; machine.c includes it.
//
// It accepts what a GPU would accept: cuTensorMapEncodeTiled has the rules of the driver API's reference, launches have
// the limits of grids, threads and shared memory. Each launch is recorded. A device's number is its compute capability.

#include "cuda.h"
#include <stdlib.h>
#include <string.h>

typedef struct {
  char name[104];
  CUfunction binary;
  unsigned grid[3];
  unsigned threads;
  unsigned shared_bytes;
} Launch;

enum { ROOM = 4096 };
Launch launches[ROOM];
int num_launches = 0;  // further launches are counted, not recorded
const char *fault = "invalid value";

static CUdevice current = 90;

static CUresult refuse(const char *why) {
  fault = why;
  return CUDA_ERROR_INVALID_VALUE;
}

static int shared_kib(CUdevice device) {  // of a program
  return device == 90 || device / 10 == 10 ? 227 : device == 80 ? 163 : 99;
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = fault; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)&current; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = current; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  current = device;
  *context = (CUcontext)&current;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = device / 10; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = device % 10; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 1024 * shared_kib(device); break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 1024 * (shared_kib(device) + 1); break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 1;
  }
  return CUDA_SUCCESS;
}

// Tensors lie in host memory here; each address counts as one of the device.
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    return refuse("unknown attribute of a pointer");
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)image;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)strdup(name);  // kept until the process ends
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  *clusters = 1;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  if (config->gridDimX == 0 || config->gridDimX > 0x7fffffff || config->gridDimY == 0 || config->gridDimY > 65535 ||
      config->gridDimZ == 0 || config->gridDimZ > 65535)
    return refuse("a grid beyond the limits of 2**31 - 1, 65535, 65535");
  if (config->blockDimX > 1024)
    return refuse("a program of more than 1024 threads");
  if (config->sharedMemBytes > 1024u * shared_kib(current))
    return refuse("more shared memory than a program has");
  if (num_launches < ROOM) {
    Launch *launch = &launches[num_launches];
    strncpy(launch->name, (const char *)function, sizeof(launch->name) - 1);
    launch->binary = function;
    launch->grid[0] = config->gridDimX;
    launch->grid[1] = config->gridDimY;
    launch->grid[2] = config->gridDimZ;
    launch->threads = config->blockDimX;
    launch->shared_bytes = config->sharedMemBytes;
  }
  num_launches++;
  return run_launch(config, function, parameters);
}

static int element_bytes(CUtensorMapDataType type) {
  switch (type) {
  case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
  case CU_TENSOR_MAP_DATA_TYPE_UINT16:
  case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
  case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
  case CU_TENSOR_MAP_DATA_TYPE_INT64:
  case CU_TENSOR_MAP_DATA_TYPE_UINT64:
  case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
  default: return 4;
  }
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  if ((size_t)map % 64)
    return refuse("a descriptor that isn't aligned to 64 bytes");
  if (rank < 1 || rank > 5)
    return refuse("a descriptor of fewer than 1 or more than 5 dimensions");
  if ((size_t)address % 16)
    return refuse("a descriptor of an address that isn't a multiple of 16 bytes");
  for (cuuint32_t i = 0; i < rank; i++) {
    if (sizes[i] == 0 || sizes[i] > 1ull << 32)
      return refuse("a descriptor of a size of 0 or more than 2**32");
    if (box[i] == 0 || box[i] > 256)
      return refuse("a descriptor's block of 0 or more than 256 elements along a dimension");
    if (i + 1 < rank && (strides[i] % 16 || strides[i] >= 1ull << 40))
      return refuse("a descriptor's stride that isn't a multiple of 16 bytes or reaches 2**40");
  }
  unsigned row = box[0] * element_bytes(type);
  if (row % 16)
    return refuse("a descriptor's block whose rows aren't multiples of 16 bytes");
  if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && row > 16u << (int)swizzle)  // 32, 64 or 128 bytes
    return refuse("a descriptor's block whose rows are longer than its swizzle");
  memset(map, 0, sizeof(*map));
  if (!encode_map(map, element_bytes(type), rank, address, sizes, strides, box, swizzle, fill))
    return refuse("a descriptor that the virtual GPU doesn't model");
  return CUDA_SUCCESS;
}
