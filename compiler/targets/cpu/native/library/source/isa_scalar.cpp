#include "kernels.h"
#include "panels.h"
#include "simd_scalar.h"

#include "math.inl"
#include "codes.inl"
#include "products.inl"
#include "attention.inl"
#include "mixers.inl"

#define TW_TABLE scalar_kernels
#include "table.inl"
