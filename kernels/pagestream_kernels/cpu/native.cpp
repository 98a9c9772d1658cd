// The CPU ops that torch has no fast form of: products with 8-bit weights, attention that reads the
// paged cache where it lies, and the small ops around them without temporaries.
//
// Plain C functions over pointers, called through ctypes by native.py, which describes them. The
// threads are those of torch: the OpenMP symbols are left for its library to provide. Sums are
// taken in an order that depends on the shapes of one row only, so a row's result does not depend
// on the batch around it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t GROUP = 32;      // weights that share a scale and a minimum
constexpr int64_t LANES = 16;      // outputs of one vector
constexpr int64_t TILE_N = 32;     // outputs of one packed tile
constexpr float STEPS = 16256.f;   // 127 * 128, on either side of zero: activations have 15 bits
constexpr float PER_SCALE = 17.f;  // steps of a weight's scale; sixteen levels fall on the grid

// exp for x <= 0, to 2 ulp: a polynomial that vectorizes (Cephes' expf).
inline float exp_negative(float x) {
    x = std::max(x, -87.f);
    const float n = std::floor(x * 1.44269504f + 0.5f);
    x = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * x + 1.3981999507e-3f;
    p = p * x + 8.3334519073e-3f;
    p = p * x + 4.1665795894e-2f;
    p = p * x + 1.6666665459e-1f;
    p = p * x + 5.0000001201e-1f;
    p = p * x * x + x + 1.f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

// Where the keys or values of one request and KV head lie.
struct Pages {
    const int32_t* table;
    int64_t block_size, block_stride, slot_stride, head_offset, length;

    // Calls visit(first token of a page, the page's rows, their number) in order.
    template <typename Visit>
    void each(const float* cache, Visit visit) const {
        for (int64_t start = 0; start < length; start += block_size)
            visit(start, cache + table[start / block_size] * block_stride + head_offset,
                  std::min(block_size, length - start));
    }
};

// Turns scores into weights that sum to one.
void softmax(float* w, int64_t length) {
    float most = -INFINITY, total = 0;
#pragma omp simd reduction(max : most)
    for (int64_t t = 0; t < length; t++) most = std::max(most, w[t]);
#pragma omp simd reduction(+ : total)
    for (int64_t t = 0; t < length; t++) {
        w[t] = exp_negative(w[t] - most);
        total += w[t];
    }
    const float inverse = 1.f / total;
#pragma omp simd
    for (int64_t t = 0; t < length; t++) w[t] *= inverse;
}

// One query head: answer [d]; weights has room for the length and LANES more.
void attend_any(const float* query, const float* k_cache, const float* v_cache, const Pages& pages,
                float* answer, float* weights, int64_t d, float scale) {
    pages.each(k_cache, [&](int64_t start, const float* key, int64_t count) {
        for (int64_t t = 0; t < count; t++, key += pages.slot_stride) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < d; j++) sum += query[j] * key[j];
            weights[start + t] = scale * sum;
        }
    });
    softmax(weights, pages.length);
    std::fill(answer, answer + d, 0.f);
    pages.each(v_cache, [&](int64_t start, const float* value, int64_t count) {
        for (int64_t t = 0; t < count; t++, value += pages.slot_stride) {
            const float w = weights[start + t];
#pragma omp simd
            for (int64_t j = 0; j < d; j++) answer[j] += w * value[j];
        }
    });
}

typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));

typedef int32_t Places __attribute__((vector_size(64)));

// The sums of sixteen vectors, in order: neighbours are added until each vector is one lane.
inline Lanes sums_of(Lanes* x) {
    const Places even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++)
            x[i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], even) +
                   __builtin_shuffle(x[2 * i], x[2 * i + 1], even + 1);
    return x[0];
}

// The same for the usual sizes: a head of D stays in registers.
template <int D>
void attend(const float* query, const float* k_cache, const float* v_cache, const Pages& pages,
            float* answer, float* weights, int64_t, float scale) {
    constexpr int V = D / LANES;
    const auto lanes = [](const float* x, int v) {
        return reinterpret_cast<const Lanes*>(x)[v];
    };
    Lanes head[V], total[V];
    for (int v = 0; v < V; v++) {
        head[v] = lanes(query, v) * scale;
        total[v] = Lanes{};
    }
    pages.each(k_cache, [&, head](int64_t start, const float* key, int64_t count) {
        for (int64_t t = 0; t < count; t += LANES) {
            Lanes products[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                const float* row = key + std::min(t + i, count - 1) * pages.slot_stride;
                products[i] = head[0] * lanes(row, 0);
                for (int v = 1; v < V; v++) products[i] += head[v] * lanes(row, v);
            }
            const Lanes scores = sums_of(products);
            std::memcpy(weights + start + t, &scores, sizeof(scores));
        }
    });
    softmax(weights, pages.length);
    pages.each(v_cache, [&](int64_t start, const float* value, int64_t count) {
        Lanes sums[V];
        for (int v = 0; v < V; v++) sums[v] = total[v];
        for (int64_t t = 0; t < count; t++, value += pages.slot_stride)
            for (int v = 0; v < V; v++) sums[v] += lanes(value, v) * weights[start + t];
        for (int v = 0; v < V; v++) total[v] = sums[v];
    });
    std::memcpy(answer, total, sizeof(total));
}

struct Quantized {
    std::vector<int8_t> high, low;  // [rows, k]; value = scale * (128 high + low)
    std::vector<float> scales;      // [rows, k / GROUP], divided by PER_SCALE
    std::vector<float> sums;        // [rows, k / GROUP], of the values
};

// Activations of one row, each group by its own largest: 15 bits lose nothing that shows.
void quantize_row(const float* x, int64_t k, int64_t row, Quantized& q) {
    for (int64_t g = 0; g < k / GROUP; g++) {
        const float* v = x + g * GROUP;
        float most = 0;
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < GROUP; i++) most = std::max(most, std::fabs(v[i]));
        const float inverse = most > 0 ? STEPS / most : 0.f;
        const float scale = most / STEPS;
        int8_t* high = q.high.data() + row * k + g * GROUP;
        int8_t* low = q.low.data() + row * k + g * GROUP;
        int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < GROUP; i++) {
            const int32_t value = static_cast<int32_t>(std::nearbyint(v[i] * inverse));
            const int32_t upper = (value + 64) >> 7;
            high[i] = static_cast<int8_t>(upper);
            low[i] = static_cast<int8_t>(value - upper * 128);
            sum += value;
        }
        q.scales[row * (k / GROUP) + g] = scale / PER_SCALE;
        q.sums[row * (k / GROUP) + g] = scale * static_cast<float>(sum);
    }
}

#ifdef __AVX512VNNI__

// ROWS rows times one tile of TILE_N outputs. A packed tile is, group by group: scales and minima
// as float16 [TILE_N] each, then weights as uint8 [GROUP / 4, TILE_N, 4]; a weight is
// scale / 17 * byte + minimum.
template <int ROWS>
void multiply_tile(const Quantized& q, int64_t row, int64_t k, const uint8_t* tile, float* out,
                   int64_t stride) {
    constexpr int V = TILE_N / LANES;
    constexpr int64_t GROUP_BYTES = 2 * 2 * TILE_N + GROUP * TILE_N;
    __m512 total[ROWS][V];
    for (auto& lane : total)
        for (auto& sum : lane) sum = _mm512_setzero_ps();
    const int64_t groups = k / GROUP;
    for (int64_t g = 0; g < groups; g++, tile += GROUP_BYTES) {
        const uint8_t* weights = tile + 2 * 2 * TILE_N;
        __m512i high[ROWS][V], low[ROWS][V];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < V; v++) high[r][v] = low[r][v] = _mm512_setzero_si512();
        for (int64_t i = 0; i < GROUP / 4; i++) {
            __m512i w[V];
            for (int v = 0; v < V; v++)
                w[v] = _mm512_loadu_si512(weights + (i * TILE_N + v * LANES) * 4);
            for (int r = 0; r < ROWS; r++) {
                const int64_t at = (row + r) * k + g * GROUP + i * 4;
                int32_t four_high, four_low;
                std::memcpy(&four_high, q.high.data() + at, 4);
                std::memcpy(&four_low, q.low.data() + at, 4);
                const __m512i h = _mm512_set1_epi32(four_high), l = _mm512_set1_epi32(four_low);
                for (int v = 0; v < V; v++) {
                    high[r][v] = _mm512_dpbusd_epi32(high[r][v], w[v], h);
                    low[r][v] = _mm512_dpbusd_epi32(low[r][v], w[v], l);
                }
            }
        }
        for (int v = 0; v < V; v++) {
            const auto* halves = reinterpret_cast<const __m256i*>(tile) + v;
            const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(halves));
            const __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256(halves + V));
            for (int r = 0; r < ROWS; r++) {
                const int64_t at = (row + r) * groups + g;
                const __m512 sum = _mm512_cvtepi32_ps(
                    _mm512_add_epi32(_mm512_slli_epi32(high[r][v], 7), low[r][v]));
                const __m512 scaled = _mm512_mul_ps(scale, _mm512_set1_ps(q.scales[at]));
                total[r][v] = _mm512_fmadd_ps(sum, scaled, total[r][v]);
                total[r][v] =
                    _mm512_fmadd_ps(minimum, _mm512_set1_ps(q.sums[at]), total[r][v]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++)
            _mm512_storeu_ps(out + r * stride + v * LANES, total[r][v]);
}

#endif

}  // namespace

extern "C" {

int pagestream_has_int8() {
#ifdef __AVX512VNNI__
    return 1;
#else
    return 0;
#endif
}

// out [m, n] = x [m, k] times packed weights; n a multiple of TILE_N, k of GROUP.
void pagestream_int8_linear(const float* x, const uint8_t* packed, float* out, int64_t m, int64_t n,
                            int64_t k) {
#ifdef __AVX512VNNI__
    static thread_local Quantized q;  // of the calling thread; its team shares it
    q.high.resize(m * k);
    q.low.resize(m * k);
    q.scales.resize(m * (k / GROUP));
    q.sums.resize(m * (k / GROUP));
    Quantized& shared = q;
    const int64_t tile_bytes = k / GROUP * (2 * 2 * TILE_N + GROUP * TILE_N);
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < m; row++) quantize_row(x + row * k, k, row, shared);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < n / TILE_N; t++) {
            const uint8_t* tile = packed + t * tile_bytes;
            int64_t row = 0;
            for (; row + 4 <= m; row += 4)
                multiply_tile<4>(shared, row, k, tile, out + row * n + t * TILE_N, n);
            for (; row < m; row++)
                multiply_tile<1>(shared, row, k, tile, out + row * n + t * TILE_N, n);
        }
    }
#endif
}

// One query token per listed row of q; caches are [blocks, block_size, kv_heads, d].
void pagestream_decode_attention(const float* q, const float* k_cache, const float* v_cache,
                                 float* out, const int64_t* rows, const int64_t* seq_lens,
                                 const int32_t* tables, int64_t num_rows, int64_t table_stride,
                                 int64_t block_size, int64_t kv_heads, int64_t group, int64_t d,
                                 int64_t q_stride, int64_t block_stride, float scale) {
    const auto one_head = d == 64 ? attend<64> : d == 128 ? attend<128> : attend_any;
    // The heads of a request lie side by side in memory, so that one thread should read them all.
    const int64_t chunk = num_rows >= 4 ? kv_heads : 1;
#pragma omp parallel
    {
        std::vector<float> weights;
#pragma omp for collapse(2) schedule(dynamic, chunk)
        for (int64_t i = 0; i < num_rows; i++) {
            for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
                const Pages pages{tables + i * table_stride, block_size,  block_stride,
                                  kv_heads * d,              kv_head * d, seq_lens[i]};
                weights.resize(pages.length + LANES);
                for (int64_t g = kv_head * group; g < (kv_head + 1) * group; g++)
                    one_head(q + rows[i] * q_stride + g * d, k_cache, v_cache, pages,
                             out + (rows[i] * kv_heads * group + g) * d, weights.data(), d, scale);
            }
        }
    }
}

// residual += x, if x is given; out = rms_norm(residual) * weight.
void pagestream_add_rms_norm(const float* x, float* residual, const float* weight, float* out,
                             int64_t rows, int64_t n, float eps) {
#pragma omp parallel for schedule(static) if (rows > 8)
    for (int64_t r = 0; r < rows; r++) {
        float* from = residual + r * n;
        float squares = 0;
        if (x != nullptr) {
            const float* added = x + r * n;
#pragma omp simd
            for (int64_t i = 0; i < n; i++) from[i] += added[i];
        }
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < n; i++) squares += from[i] * from[i];
        const float factor = 1.f / std::sqrt(squares / n + eps);
        float* to = out + r * n;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) to[i] = from[i] * factor * weight[i];
    }
}

// out [rows, n] = silu(x[:, :n]) * x[:, n:]
void pagestream_silu_and_mul(const float* x, float* out, int64_t rows, int64_t n) {
#pragma omp parallel for schedule(static) if (rows > 8)
    for (int64_t r = 0; r < rows; r++) {
        const float* gate = x + r * 2 * n;
        const float* up = gate + n;
        float* to = out + r * n;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            const float e = exp_negative(-std::fabs(gate[i]));
            const float sigmoid = (gate[i] >= 0 ? 1.f : e) / (1.f + e);
            to[i] = gate[i] * sigmoid * up[i];
        }
    }
}

// Rotate q and k by halves (GPT-NeoX style) and write k and v to their slots. Table rows are cos
// then sin, d / 2 each. heads: [tokens, q_heads + 2 * kv_heads, d] with a stride between tokens.
void pagestream_rope_kv_write(const float* heads, int64_t stride, const float* table,
                              const int64_t* positions, const int64_t* slots, float* q_out,
                              float* k_cache, float* v_cache, int64_t tokens, int64_t q_heads,
                              int64_t kv_heads, int64_t d) {
    const int64_t half = d / 2;
#pragma omp parallel for schedule(static) if (tokens > 8)
    for (int64_t t = 0; t < tokens; t++) {
        const float* from = heads + t * stride;
        const float* cos = table + positions[t] * d;
        const float* sin = cos + half;
        for (int64_t h = 0; h < q_heads + kv_heads; h++, from += d) {
            const bool is_query = h < q_heads;
            if (!is_query && slots[t] < 0) continue;
            float* to = is_query ? q_out + (t * q_heads + h) * d
                                 : k_cache + (slots[t] * kv_heads + h - q_heads) * d;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                to[i] = from[i] * cos[i] - from[half + i] * sin[i];
                to[half + i] = from[half + i] * cos[i] + from[i] * sin[i];
            }
        }
        if (slots[t] >= 0)
            std::memcpy(v_cache + slots[t] * kv_heads * d, from, sizeof(float) * kv_heads * d);
    }
}

}  // extern "C"
