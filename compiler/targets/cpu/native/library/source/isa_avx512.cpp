#include "kernels.h"
#include "panels.h"
#include "simd_avx512.h"

#include "math.inl"
#include "codes.inl"
#include "products.inl"
#include "attention.inl"
#include "mixers.inl"

#define TW_TABLE avx512_kernels
#include "table.inl"
