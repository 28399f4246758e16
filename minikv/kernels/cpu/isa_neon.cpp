// ARMv8.2 with the dot-product extension.
#include "common.h"

#if defined(MKV_HAVE_NEON)
#include <arm_neon.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("arch=armv8.2-a+dotprod+fp16"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod+fp16")
#endif
#define MKV_NAMESPACE neon
#define MKV_NAME "neon"
#define MKV_NEON
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
