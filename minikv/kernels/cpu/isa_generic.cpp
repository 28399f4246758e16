// Plain C++ for every other processor, and the measure that the fast kernels are tested against.
#include "common.h"
#define MKV_NAMESPACE generic
#define MKV_NAME "generic"
#include "kernels.h"
