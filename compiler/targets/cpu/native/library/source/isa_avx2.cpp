#include "kernels.h"
#include "panels.h"
#include "simd_avx2.h"

#include "math.inl"
#include "codes.inl"
#include "products.inl"
#include "signed_avx2.inl"
#include "attention.inl"
#include "mixers.inl"

#define TW_TABLE avx2_kernels
#include "table.inl"
