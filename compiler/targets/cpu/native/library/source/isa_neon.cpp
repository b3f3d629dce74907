#include "kernels.h"
#include "panels.h"
#include "simd_neon.h"

#include "math.inl"
#include "codes.inl"
#include "products.inl"
#include "attention.inl"
#include "mixers.inl"

#define TW_TABLE neon_kernels
#include "table.inl"
