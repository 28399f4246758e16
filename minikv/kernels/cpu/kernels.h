// All kernels, for one instruction set; the including file says which.
#pragma once

#include "simd.h"
#include "dots.h"
#include "matmul.h"
#include "attention.h"
#include "ops.h"
#include "products.h"
#include "slots.h"
#include "look.h"
#include "lanes.h"
#include "estimate.h"
#include "route.h"
#include "forward.h"
