// x86-64 with AVX2, FMA and F16C.
#include "common.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define MKV_NAMESPACE avx2
#define MKV_NAME "avx2"
#define MKV_AVX2
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
