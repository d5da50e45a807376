// What was before an AdamW update, from what is there after it.
// Included by kernels.cpp alone, inside the namespace of the instruction set.

// [Note: lost gradients]
// The first moment before and after an update tells the gradient to about 2^-20 of the moment, which is enough for the
// 8 or 11 digits of a gradient that is not a thousand times smaller. One of 0 leaves a moment that nothing else leaves,
// but for gradients too small to change it. Parameters after an update, less what it has added by the moments after it,
// are those before it to a few units in the last place; of these the low bits are known, so that the high ones follow.
// Neither need be right: an update tells of which elements it is not, and those are few.
//
// Trying it out for each element takes nearly half the time of the update itself. So the update only keeps, of some
// elements at a time, what tells that all of them surely come back ([Note: doubt]); the others are tried out.
struct Reconstruction {
    explicit Reconstruction(const Scalars& s)
        : s(s), from_avg(s.m_weight < 0.5f), m_weight(from_avg ? s.m_weight : s.m_weight - 1.0f),
          inverse_weight(1.0f / s.m_weight), inverse_scale(1.0f / s.grad_scale), inverse_factor(1.0f / s.param_factor) {
    }

    float moment(float before, float g) const {
        return (from_avg ? before : g) + m_weight * (g - before); // torch's lerp starts from the nearer end
    }

    float moved(float first, float second) const { return s.step_size * first / (sqrtf(second) * s.inv_bias2 + s.eps); }

    float grad(float before, float after) const {
        const float g = (before + (after - before) * inverse_weight) * inverse_scale;
        return after == moment(before, 0.0f) ? 0.0f : g;
    }

    // The bits of the master before an update, to a few units.
    uint32_t about_master(float after, float first, float second) const {
        return bits_of((after - moved(first, second)) * inverse_factor);
    }

    const Scalars s;
    const bool from_avg;
    const float m_weight, inverse_weight, inverse_scale, inverse_factor;
};

// Half a step of a 16-bit gradient in steps of fp32: what is nearer is rounded to it.
constexpr uint32_t half_step(Dtype dtype) {
    return dtype == Dtype::bf16 ? 0x8000u : 0x1000u;
}

// Whether `found` is not rounded to `given`, or may be not; as integers, floats are in order, and neighbours one apart.
inline bool is_lost(float found, float given, uint32_t half_step) {
    const bool near = bits_of(found) - bits_of(given) + (half_step - 1) < 2 * half_step - 1;
    return !near | is_nan(bits_of(given)); // whose other bits are not those that rounding leaves
}

inline bool is_lost_master(uint32_t about, uint32_t given) {
    const bool near = given - about + 0x8000u < 0x10000u;
    return !near | is_nan(given); // of which the low bits may be anything
}

// --- which elements surely come back --------------------------------------------------------------------------------

// [Note: doubt]
// With u = 2^-24 and g the scaled gradient, b the moment before and w the gradient's weight, roundings move what is
// reconstructed of g by less than u (10 |g| + (6 + 1/w) |b|): six of g - b and what is made of it, that of the new
// moment divided by w, the rest of g alone. Half a step is 2^-9 |g| for bf16, 2^-12 |g| for fp16, so g comes back where
//
//     |b| 1.25 (6 + 1/w) 2^-15 < |g|,
//
// which leaves room for second orders. Squares say the same without signs, and v_weight g^2 is there anyway. A master p
// comes back if the update has moved it by less than 2^14 |p|; 2^12 here. Both count on numbers that are neither near
// overflow nor denormal, and on a weight, scale and factor of the usual size: whatever is not so is in doubt.

// Bits of floats without their signs, which are in order as integers.
constexpr uint32_t kTiny = 27u << 23;   // 2^-100
constexpr uint32_t kLarge = 227u << 23; // 2^100
constexpr uint32_t kWay = 12u << 23;    // what an exponent may be above another

inline uint32_t magnitude(float x) {
    return bits_of(x) & 0x7fffffffu;
}

// Over some elements of an update.
struct Extremes {
    // margin: of the gradient's square over what roundings may come to; below zero or no number where it is in doubt.
    void add(float margin, float param, float moved) {
        const uint32_t above = bits_of(margin) - kTiny; // anything below, negative or not, is far above
        furthest_margin = furthest_margin > above ? furthest_margin : above;
        const uint32_t size = magnitude(param), way = magnitude(moved);
        least_param = least_param < size ? least_param : size;
        most_param = most_param > size ? most_param : size;
        most_moved = most_moved > way ? most_moved : way;
    }

    bool doubts_grads() const { return furthest_margin > kLarge - kTiny; }

    bool doubts_params() const { return least_param < kTiny || most_param > kLarge || most_moved > least_param + kWay; }

    uint32_t furthest_margin = 0, least_param = ~0u, most_param = 0, most_moved = 0;
};

// What an update finds out on its way of at most kStep elements.
struct Doubt {
    Doubt(const Scalars& s, Dtype dtype)
        : usual(s.m_weight >= 0x1p-10f && s.m_weight <= 1.0f && s.grad_scale >= 0x1p-40f && s.grad_scale <= 0x1p40f &&
                s.v_weight >= 0x1p-40f && s.v_weight <= 1.0f && s.param_factor >= 0.5f && s.param_factor <= 1.0f) {
        const float least = 1.25f * (6.0f + 1.0f / s.m_weight) * (dtype == Dtype::bf16 ? 0x1p-15f : 0x1p-12f);
        share = least * least * s.v_weight;
    }

    void note(const Extremes& extremes) {
        grads = !usual || extremes.doubts_grads();
        params = !usual || extremes.doubts_params();
    }

    const bool usual;
    float share;                      // of the moment's square, below which a gradient's (by v_weight) is in doubt
    bool grads = true, params = true; // some may be lost
    alignas(64) float before[kStep];  // the first moment
};
