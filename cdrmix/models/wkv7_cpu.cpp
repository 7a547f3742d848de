// The WKV-7 recurrence and its gradient on CPUs; plain C ABI, float32, loaded with ctypes.
//
//   S_t = S_{t-1} diag(w_t) + (S_{t-1} a_t) b_t^T + v_t k_t^T,   y_t = S_t r_t,   w_t = exp(lw_t)
//
// B batch, T time, H heads, K key dim, V value dim. Tensors are contiguous: r, lw, k, a, b
// [B,T,H,K], v, y [B,T,H,V], states [B,H,V,K].
//
// The rows of a state never meet within a token: each is a vector of K lanes that sees the same
// r, w, k, a, b. So time goes in tiles whose vectors stay in the L1 cache, and ROWS rows at a time
// walk through a tile. The gradient replays a tile from the state that entered it. Nothing divides
// by w: stepping back through S_t that way loses four digits in 16 tokens of fast decay.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int ROWS = LANES / 2;  // two sums per row and token: together they fill one vector
constexpr int TILE = 32;         // tokens; 16 was 7 % slower and saves twice the states

typedef float vec __attribute__((vector_size(LANES * 4), may_alias));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
typedef int ivec __attribute__((vector_size(LANES * 4)));
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (ivec){__VA_ARGS__})
#endif

inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline void store(float* p, vec x) { *reinterpret_cast<vec*>(p) = x; }

// Lane i of the result is the sum of all lanes of x[i]: a transposition that adds as it goes.
#if defined(__AVX512F__)
inline vec sum_pairs(vec x, vec y) {
  return SHUFFLE(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
         SHUFFLE(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
inline vec sum_fours(vec x, vec y) {
  return SHUFFLE(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
         SHUFFLE(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
inline vec sum_eights(vec x, vec y) {
  return SHUFFLE(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         SHUFFLE(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
inline vec sums(const vec* x) {
  vec q[4];
  for (int i = 0; i < 4; i++, x += 4)
    q[i] = sum_fours(sum_pairs(x[0], x[1]), sum_pairs(x[2], x[3]));
  const vec low = sum_eights(q[0], q[1]), high = sum_eights(q[2], q[3]);
  return SHUFFLE(low, high, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         SHUFFLE(low, high, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
#elif defined(__AVX__)
inline vec sum_pairs(vec x, vec y) {
  return SHUFFLE(x, y, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(x, y, 2, 10, 3, 11, 6, 14, 7, 15);
}
inline vec sum_fours(vec x, vec y) {
  return SHUFFLE(x, y, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(x, y, 2, 3, 10, 11, 6, 7, 14, 15);
}
inline vec sums(const vec* x) {
  const vec low = sum_fours(sum_pairs(x[0], x[1]), sum_pairs(x[2], x[3]));
  const vec high = sum_fours(sum_pairs(x[4], x[5]), sum_pairs(x[6], x[7]));
  return SHUFFLE(low, high, 0, 1, 2, 3, 8, 9, 10, 11) +
         SHUFFLE(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
}
#else
inline vec sums(const vec* x) {
  const vec low = SHUFFLE(x[0], x[1], 0, 4, 1, 5) + SHUFFLE(x[0], x[1], 2, 6, 3, 7);
  const vec high = SHUFFLE(x[2], x[3], 0, 4, 1, 5) + SHUFFLE(x[2], x[3], 2, 6, 3, 7);
  return SHUFFLE(low, high, 0, 1, 4, 5) + SHUFFLE(low, high, 2, 3, 6, 7);
}
#endif

// exp on [-exp(-0.5), 0], the op's range: its Taylor series about 0, rest below 2e-9. About 0 since
// errors of one sign would add up over the many tokens that a slow decay, near 1, spans.
inline vec decay(vec x) {
  vec p = x * (1.f / 362880) + 1.f / 40320;
  p = p * x + 1.f / 5040;
  p = p * x + 1.f / 720;
  p = p * x + 1.f / 120;
  p = p * x + 1.f / 24;
  p = p * x + 1.f / 6;
  p = p * x + 0.5f;
  p = p * x + 1.f;
  return p * x + 1.f;
}

// Zeroed floats at the alignment of a vector.
class Buffer {
 public:
  explicit Buffer(int64_t floats) : storage_((floats + LANES - 1) / LANES) {}
  operator float*() { return storage_[0].lane; }
  operator const float*() const { return storage_[0].lane; }

 private:
  struct alignas(vec) Lanes {
    float lane[LANES] = {};
  };
  std::vector<Lanes> storage_;
};

int padded(int64_t size, int multiple) { return int((size + multiple - 1) / multiple * multiple); }

}  // namespace

extern "C" {

struct Shape {
  int64_t B, T, H, K, V;
};

struct Inputs {
  const float *r, *lw, *k, *v, *a, *b;
  const uint8_t* starts;  // [B,T], 1 where the state begins anew at zero; or null
};

struct Gradients {
  float *r, *lw, *k, *v, *a, *b;
  float* s0;  // or null
};

int wkv7_tile() { return TILE; }

}  // extern "C"

namespace {

// The tokens [begin, begin + size) of one head, rows padded with zeros to whole vectors.
struct Tile {
  Tile(const Shape& shape, const Inputs& inputs)
      : shape(shape), inputs(inputs), K(padded(shape.K, LANES)), V(padded(shape.V, ROWS)),
        lw(TILE * K), w(TILE * K), a((TILE + 1) * K), b(TILE * K), k(TILE * K), r(TILE * K),
        v(TILE * V) {}

  void read(int64_t batch, int64_t head, int64_t begin) {
    size = int(std::min<int64_t>(TILE, shape.T - begin));
    token = batch * shape.T + begin;
    row = token * shape.H + head;
    gather_keys(lw, inputs.lw);
    for (int i = 0; i < size * K; i += LANES) store(w + i, decay(load(lw + i)));
    gather_keys(a, inputs.a);
    gather_keys(b, inputs.b);
    gather_keys(k, inputs.k);
    gather_keys(r, inputs.r);
    gather_values(v, inputs.v);
    // w = a = 0 cuts the state off: S_t = v_t k_t^T
    for (int t = 0; t < size; t++)
      if (starts_at(t)) std::fill_n(w + t * K, K, 0.f), std::fill_n(a + t * K, K, 0.f);
  }

  bool starts_at(int t) const { return inputs.starts && inputs.starts[token + t]; }

  void gather_keys(float* to, const float* from) const { gather(to, from, K, shape.K); }
  void gather_values(float* to, const float* from) const { gather(to, from, V, shape.V); }
  void scatter_keys(float* to, const float* from) const { scatter(to, from, K, shape.K); }
  void scatter_values(float* to, const float* from) const { scatter(to, from, V, shape.V); }

  const Shape& shape;
  const Inputs& inputs;
  const int K, V;  // padded
  int size = 0;
  int64_t token = 0, row = 0;
  Buffer lw, w, a, b, k, r, v;

 private:
  void gather(float* to, const float* from, int stride, int64_t width) const {
    for (int t = 0; t < size; t++)
      std::copy_n(from + (row + t * shape.H) * width, width, to + t * stride);
  }
  void scatter(float* to, const float* from, int stride, int64_t width) const {
    for (int t = 0; t < size; t++)
      std::copy_n(from + t * stride, width, to + (row + t * shape.H) * width);
  }
};

// Takes ROWS rows of the state, S [ROWS,K], through a tile; y and sa = S_{t-1} a_t are [TILE,V].
// Each pass over the state also forms the next token's sa, so that it is read once per token.
void forward_rows(const Tile& x, float* S, float* y, float* sa, int first) {
  const int K = x.K, V = x.V;
  alignas(64) float out[LANES];  // y_t of the rows, then sa of the next token
  vec sum[LANES] = {};
  for (int j = 0; j < K; j += LANES)
    for (int i = 0; i < ROWS; i++) sum[ROWS + i] += load(S + i * K + j) * load(x.a + j);
  store(out, sums(sum));
  for (int t = 0; t < x.size; t++) {
    float Sa[ROWS];
    std::copy_n(out + ROWS, ROWS, Sa);
    std::copy_n(Sa, ROWS, sa + t * V + first);
    const float* v = x.v + t * V + first;
    const int at = t * K;
    for (int i = 0; i < LANES; i++) sum[i] = vec{};
    for (int j = 0; j < K; j += LANES) {
      const vec w = load(x.w + at + j), b = load(x.b + at + j), k = load(x.k + at + j);
      const vec r = load(x.r + at + j), a_next = load(x.a + at + K + j);
      for (int i = 0; i < ROWS; i++) {
        const vec s = load(S + i * K + j) * w + Sa[i] * b + v[i] * k;
        store(S + i * K + j, s);
        sum[i] += s * r;
        sum[ROWS + i] += s * a_next;
      }
    }
    store(out, sums(sum));
    std::copy_n(out, ROWS, y + t * V + first);
  }
}

// Gradients of a tile's tokens, and what they are made from.
struct TileGradient {
  TileGradient(int K, int V)
      : dr(TILE * K), dw(TILE * K), dk(TILE * K), da(TILE * K), db(TILE * K),
        dv(TILE * V), dy(TILE * V), sa(TILE * V) {}

  void clear(int floats) {
    for (float* sum : {(float*)dr, (float*)dw, (float*)dk, (float*)da, (float*)db})
      std::fill_n(sum, floats, 0.f);
  }

  Buffer dr, dw, dk, da, db, dv, dy, sa;
};

// Recomputes the states of ROWS rows, S [TILE + 1,ROWS,K] with S[0] given; adds S_t^T dy_t to dr.
void replay_rows(const Tile& x, TileGradient& g, float* S, int first) {
  const int K = x.K;
  for (int t = 0; t < x.size; t++, S += ROWS * K) {
    const float *v = x.v + t * x.V + first, *sa = g.sa + t * x.V + first;
    const float* dy = g.dy + t * x.V + first;
    const int at = t * K;
    for (int j = 0; j < K; j += LANES) {
      const vec w = load(x.w + at + j), b = load(x.b + at + j), k = load(x.k + at + j);
      vec dr = load(g.dr + at + j);
      for (int i = 0; i < ROWS; i++) {
        const vec s = load(S + i * K + j) * w + sa[i] * b + v[i] * k;
        store(S + (ROWS + i) * K + j, s);
        dr += s * dy[i];
      }
      store(g.dr + at + j, dr);
    }
  }
}

// Moves G = dL/dS of ROWS rows from token t (LEAVE: G belongs to S_t, S is S_{t-1}) to token t - 1
// (ENTER: y_{t-1} adds to G). `dsa` is the gradient of sa: of token t before, of t - 1 after.
template <bool LEAVE, bool ENTER>
void step_back(const Tile& x, TileGradient& g, float* G, const float* S, int t, int first,
               float* dsa) {
  const int K = x.K, from = t * K, to = (t - 1) * K, values = (t - 1) * x.V + first;
  vec sum[LANES] = {};
  for (int j = 0; j < K; j += LANES) {
    vec w{}, a{}, dw{}, da{}, r{}, k{}, b{}, dk{}, db{};
    if (LEAVE) {
      w = load(x.w + from + j), a = load(x.a + from + j);
      dw = load(g.dw + from + j), da = load(g.da + from + j);
    }
    if (ENTER) {
      r = load(x.r + to + j), k = load(x.k + to + j), b = load(x.b + to + j);
      dk = load(g.dk + to + j), db = load(g.db + to + j);
    }
    for (int i = 0; i < ROWS; i++) {
      vec q = load(G + i * K + j);
      if (LEAVE) {
        const vec s = load(S + i * K + j);
        dw += q * s;
        da += dsa[i] * s;
        q = q * w + dsa[i] * a;
      }
      if (ENTER) {
        q += g.dy[values + i] * r;
        sum[i] += q * k;
        sum[ROWS + i] += q * b;
        dk += x.v[values + i] * q;
        db += g.sa[values + i] * q;
      }
      store(G + i * K + j, q);
    }
    if (LEAVE) store(g.dw + from + j, dw), store(g.da + from + j, da);
    if (ENTER) store(g.dk + to + j, dk), store(g.db + to + j, db);
  }
  if (ENTER) {
    alignas(64) float out[LANES];
    store(out, sums(sum));
    std::copy_n(out, ROWS, g.dv + values);
    std::copy_n(out + ROWS, ROWS, dsa);
  }
}

// Gradients of one tile. G [V,K] is dL/dS after its last token on entry, before its first on exit;
// `entering` [shape.V,shape.K] is the state before its first token, S [TILE + 1,ROWS,K] scratch.
void backward_tile(const Tile& x, TileGradient& g, float* G, float* S, const float* entering) {
  const int K = x.K;
  const int64_t width = x.shape.K;
  g.clear(x.size * K);
  for (int first = 0; first < x.V; first += ROWS) {
    std::fill_n(S, ROWS * K, 0.f);
    for (int64_t i = first; i < std::min<int64_t>(first + ROWS, x.shape.V); i++)
      std::copy_n(entering + i * width, width, S + (i - first) * K);
    replay_rows(x, g, S, first);
    float dsa[ROWS];
    float* rows = G + first * K;
    step_back<false, true>(x, g, rows, nullptr, x.size, first, dsa);
    for (int t = x.size - 1; t > 0; t--)
      step_back<true, true>(x, g, rows, S + t * ROWS * K, t, first, dsa);
    step_back<true, false>(x, g, rows, S, 0, first, dsa);
  }
  for (int i = 0; i < x.size * K; i += LANES) store(g.dw + i, load(g.dw + i) * load(x.w + i));
  for (int t = 0; t < x.size; t++)
    if (x.starts_at(t)) std::fill_n(g.da + t * K, K, 0.f);
}

void copy_rows(float* to, int to_stride, const float* from, int from_stride, int64_t rows,
               int64_t width) {
  for (int64_t i = 0; i < rows; i++) std::copy_n(from + i * from_stride, width, to + i * to_stride);
}

}  // namespace

extern "C" {

// s0, sa [B,T,H,V] and states [B,H,ceil(T/TILE),V,K] may be null; the gradient needs the last two.
void wkv7_forward(const Shape* shape, const Inputs* inputs, const float* s0, float* y, float* s,
                  float* sa, float* states, int threads) {
  const int64_t T = shape->T, H = shape->H, K = shape->K, V = shape->V;
#pragma omp parallel num_threads(threads)
  {
    Tile x(*shape, *inputs);
    Buffer S(int64_t(x.V) * x.K), tile_y(TILE * x.V), tile_sa(TILE * x.V);
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < shape->B * H; n++) {
      std::fill_n((float*)S, x.V * x.K, 0.f);
      if (s0) copy_rows(S, x.K, s0 + n * V * K, K, V, K);
      for (int64_t begin = 0; begin < T; begin += TILE) {
        const int64_t tile = n * ((T + TILE - 1) / TILE) + begin / TILE;
        if (states) copy_rows(states + tile * V * K, K, S, x.K, V, K);
        x.read(n / H, n % H, begin);
        for (int i = 0; i < x.V; i += ROWS) forward_rows(x, S + i * x.K, tile_y, tile_sa, i);
        x.scatter_values(y, tile_y);
        if (sa) x.scatter_values(sa, tile_sa);
      }
      copy_rows(s + n * V * K, K, S, x.K, V, K);
    }
  }
}

void wkv7_backward(const Shape* shape, const Inputs* inputs, const float* sa, const float* states,
                   const float* dy, const float* ds, const Gradients* out, int threads) {
  const int64_t T = shape->T, H = shape->H, K = shape->K, V = shape->V;
  const int64_t tiles = (T + TILE - 1) / TILE;
#pragma omp parallel num_threads(threads)
  {
    Tile x(*shape, *inputs);
    TileGradient g(x.K, x.V);
    Buffer G(int64_t(x.V) * x.K), S((TILE + 1) * ROWS * x.K);
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < shape->B * H; n++) {
      std::fill_n((float*)G, x.V * x.K, 0.f);
      copy_rows(G, x.K, ds + n * V * K, K, V, K);
      for (int64_t tile = tiles - 1; tile >= 0; tile--) {
        x.read(n / H, n % H, tile * TILE);
        x.gather_values(g.dy, dy);
        x.gather_values(g.sa, sa);
        backward_tile(x, g, G, S, states + (n * tiles + tile) * V * K);
        x.scatter_keys(out->r, g.dr);
        x.scatter_keys(out->lw, g.dw);
        x.scatter_keys(out->k, g.dk);
        x.scatter_values(out->v, g.dv);
        x.scatter_keys(out->a, g.da);
        x.scatter_keys(out->b, g.db);
      }
      if (out->s0) copy_rows(out->s0 + n * V * K, K, G, x.K, V, K);
    }
  }
}

}  // extern "C"
