// x86-64 with AVX-512 VL and VNNI: the AVX2 kernels with its dot-product instruction.
#include "common.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512vl,avx512vnni")
#endif
#define MKV_NAMESPACE avx512
#define MKV_NAME "avx512-vnni"
#define MKV_AVX512VNNI
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
