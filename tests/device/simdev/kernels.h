// Kernels: any operator of torch. Shapes come from its meta kernel at once, values from its CPU kernel on the stream.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "runtime.h"

namespace infinity::simdev {

using at::Tensor;
using c10::IValue;
using Values = std::vector<IValue>;

inline bool on_device(const Tensor& tensor) {
    return tensor.defined() && tensor.is_privateuseone();
}

// The tensor's memory as a stream sees it; keeps nothing alive.
inline Tensor behind(const Tensor& tensor) {
    void* address = tensor.numel() ? memory().behind(tensor.data_ptr()) : nullptr;
    return at::from_blob(address, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

inline Tensor behind_if_on_device(const Tensor& tensor) {
    return on_device(tensor) ? behind(tensor) : tensor;
}

// Arguments #

// The value with `change` applied to each tensor in it, and `device` in place of this device.
template <class Change> IValue mapped(const IValue& value, const Change& change, c10::Device device) {
    if (value.isTensor())
        return change(value.toTensor());
    if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& tensor : value.toTensorVector())
            list.push_back(change(tensor));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
            list.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
        return list;
    }
    if (value.isDevice() && value.toDevice().is_privateuseone())
        return device;
    return value;
}

template <class Visit> void for_each_tensor(const IValue& value, const Visit& visit) {
    if (value.isTensor()) {
        visit(value.toTensor());
    } else if (value.isTensorList()) {
        for (const Tensor& tensor : value.toTensorVector())
            visit(tensor);
    } else if (value.isOptionalTensorList()) {
        for (const auto& tensor : value.toOptionalTensorVector())
            if (tensor)
                visit(*tensor);
    }
}

inline bool is_written(const c10::Argument& argument) {
    return argument.alias_info() && argument.alias_info()->isWrite();
}

// The argument that this return is, or -1.
inline int written_argument(const c10::FunctionSchema& schema, std::size_t index) {
    const auto* alias = schema.returns()[index].alias_info();
    if (!alias)
        return -1;
    for (std::size_t i = 0; i < schema.arguments().size(); i++) {
        const auto* other = schema.arguments()[i].alias_info();
        if (other && other->beforeSets() == alias->beforeSets())
            return static_cast<int>(i);
    }
    return -1;
}

// Durations #

// What is really there: an expanded tensor is read once.
inline double bytes_of(const Tensor& tensor) {
    if (!tensor.defined())
        return 0;
    double numel = 1;
    for (std::int64_t dim = 0; dim < tensor.dim(); dim++)
        if (tensor.stride(dim))
            numel *= static_cast<double>(tensor.size(dim));
    return numel * static_cast<double>(tensor.itemsize());
}

inline double flops_of(const std::string& name, const Values& arguments) {
    auto product = [](const Tensor& left, const Tensor& right) {
        return 2.0 * static_cast<double>(left.numel()) * static_cast<double>(right.size(-1));
    };
    if (name == "aten::mm" || name == "aten::bmm")
        return product(arguments[0].toTensor(), arguments[1].toTensor());
    if (name == "aten::addmm" || name == "aten::baddbmm")
        return product(arguments[1].toTensor(), arguments[2].toTensor());
    return 0;
}

inline double kernel_seconds(const std::string& name, const Values& arguments, const std::vector<Tensor>& results) {
    double seconds = 0, bytes = 0;
    for (auto& value : arguments)
        for_each_tensor(value, [&](const Tensor& tensor) { bytes += bytes_of(tensor); });
    for (auto& tensor : results)
        bytes += bytes_of(tensor);
    if (settings().memory_rate)
        seconds = bytes / settings().memory_rate;
    if (settings().flops)
        seconds = std::max(seconds, flops_of(name, arguments) / settings().flops);
    return seconds + settings().launch_us * 1e-6;
}

// Launching #

inline std::atomic<long> run_at_once{0};

// Operators that have no meta kernel.
inline std::mutex without_meta_mutex;
inline std::set<std::string> without_meta;

// Not to be queued: random (the generator is the host's), without shapes in advance, or a result for the host.
inline bool must_run_at_once(const c10::OperatorHandle& op) {
    for (auto tag : {at::Tag::nondeterministic_seeded, at::Tag::data_dependent_output, at::Tag::dynamic_output_shape})
        if (op.hasTag(tag))
            return true;
    for (auto& result : op.schema().returns())
        if (result.type()->kind() != c10::TypeKind::TensorType)
            return true;
    std::lock_guard lock(without_meta_mutex);
    return without_meta.count(op.schema().name()) > 0;
}

inline void run_now(const c10::OperatorHandle& op, const Values& arguments, torch::jit::Stack* stack) {
    run_at_once++;
    drain(current_stream);
    const auto& schema = op.schema();
    std::vector<Tensor> grown(arguments.size()); // `out=` tensors without elements, which the kernel resizes
    Values host;
    for (std::size_t i = 0; i < arguments.size(); i++) {
        bool is_written_tensor = is_written(schema.arguments()[i]) && arguments[i].isTensor();
        if (is_written_tensor && on_device(arguments[i].toTensor()) && !arguments[i].toTensor().numel()) {
            grown[i] = at::empty({0}, arguments[i].toTensor().options().device(at::kCPU));
            host.push_back(grown[i]);
        } else {
            host.push_back(mapped(arguments[i], behind_if_on_device, at::kCPU));
        }
    }
    double start_s = now();
    op.callBoxed(&host);
    for (std::size_t i = 0; i < arguments.size(); i++)
        if (grown[i].defined() && grown[i].numel()) {
            Tensor target = arguments[i].toTensor();
            target.resize_(grown[i].sizes());
            target.copy_(grown[i]);
        }
    auto to_device = [](const Tensor& tensor) { return tensor.defined() ? tensor.to(kDevice) : tensor; };
    for (std::size_t index = 0; index < host.size(); index++) {
        int argument = written_argument(schema, index);
        stack->push_back(argument >= 0 ? arguments[argument] : mapped(host[index], to_device, kDevice));
    }
    keep_span(kCompute, start_s, now(), "at once: " + schema.name());
}

// What shapes follow from, as bytes: an operator and its arguments, without the values of tensors.
class Question {
  public:
    Question(const c10::OperatorHandle& op, const Values& arguments) {
        add(&op.schema());
        for (auto& argument : arguments)
            add_value(argument);
    }

    bool is_whole() const { return is_whole_; } // else it holds what cannot be told in bytes
    const std::string& bytes() const { return bytes_; }

  private:
    template <class T> void add(T value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof value); }

    template <class List> void add_list(const List& list) {
        add(list.size());
        for (auto value : list)
            add(value);
    }

    void add_tensor(const Tensor& tensor) {
        add(tensor.defined());
        if (!tensor.defined())
            return;
        add(tensor.scalar_type());
        add(tensor.device().type());
        add(tensor.unsafeGetTensorImpl()->is_wrapped_number());
        add_list(tensor.sizes());
        add_list(tensor.strides());
    }

    void add_value(const IValue& value) {
        add(static_cast<int>(value.isTensor()) + 2 * value.isInt() + 4 * value.isDouble() + 8 * value.isBool() +
            16 * value.isIntList() + 32 * value.isTensorList() + 64 * value.isNone() + 128 * value.isDevice());
        if (value.isTensor())
            add_tensor(value.toTensor());
        else if (value.isInt())
            add(value.toInt());
        else if (value.isDouble())
            add(value.toDouble());
        else if (value.isBool())
            add(value.toBool());
        else if (value.isIntList())
            add_list(value.toIntVector());
        else if (value.isTensorList()) {
            auto tensors = value.toTensorVector();
            add(tensors.size());
            std::for_each(tensors.begin(), tensors.end(), [this](const Tensor& tensor) { add_tensor(tensor); });
        } else if (value.isDevice())
            add(value.toDevice().type());
        else if (!value.isNone())
            is_whole_ = false;
    }

    std::string bytes_;
    bool is_whole_ = true;
};

// Shapes that were asked for before: torch's meta kernels are Python, and take twenty times as long as a launch does
// where there is hardware.
class KnownShapes {
  public:
    bool find(const Question& question, Values& results) {
        std::lock_guard lock(mutex_);
        auto found = known_.find(question.bytes());
        if (found == known_.end())
            return false;
        results = found->second;
        return true;
    }

    void keep(const Question& question, const Values& results) {
        std::lock_guard lock(mutex_);
        if (known_.size() >= kMost)
            known_.clear();
        known_[question.bytes()] = results;
    }

  private:
    static constexpr std::size_t kMost = 1 << 16;
    std::mutex mutex_;
    std::unordered_map<std::string, Values> known_;
};

inline KnownShapes& known_shapes() {
    static auto* shapes = new KnownShapes;
    return *shapes;
}

// Shapes of the results by the meta kernel, and of `out=` tensors, which are resized; false if there is none.
inline bool find_shapes(const c10::OperatorHandle& op, const Values& arguments, Values& results) {
    Question question(op, arguments);
    if (question.is_whole() && known_shapes().find(question, results))
        return true;
    auto to_meta = [](const Tensor& tensor) {
        if (!tensor.defined() || (!on_device(tensor) && tensor.dim() == 0))
            return tensor;
        return Tensor(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
    };
    for (auto& value : arguments)
        results.push_back(mapped(value, to_meta, at::kMeta));
    Values given = results;
    bool same_next_time = question.is_whole();
    try {
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        op.callBoxed(&results);
        for (std::size_t i = 0; i < arguments.size(); i++) {
            if (!is_written(op.schema().arguments()[i]) || !arguments[i].isTensor())
                continue;
            Tensor target = arguments[i].toTensor();
            if (on_device(target) && target.sizes() != given[i].toTensor().sizes()) {
                target.resize_(given[i].toTensor().sizes());
                same_next_time = false;
            }
        }
    } catch (const c10::Error& error) {
        if (settings().verbose)
            std::fprintf(stderr, "simdev: %s runs at once: %s\n", op.schema().name().c_str(),
                         error.what_without_backtrace());
        if (dynamic_cast<const c10::NotImplementedError*>(&error)) {
            std::lock_guard lock(without_meta_mutex);
            without_meta.insert(op.schema().name());
        }
        return false;
    }
    if (same_next_time)
        known_shapes().keep(question, results);
    return true;
}

// The type of a result; the CPU keeps the statistics of norms in the weight's type, and the meta kernel says float.
inline at::ScalarType result_type(const std::string& name, std::size_t index, const Tensor& meta,
                                  const Values& values) {
    bool is_layer_norm = name == "aten::native_layer_norm";
    if (index == 0 || (!is_layer_norm && name != "aten::native_group_norm"))
        return meta.scalar_type();
    const IValue& weight = values[is_layer_norm ? 2 : 1];
    bool has_weight = weight.isTensor() && weight.toTensor().defined();
    return (has_weight ? weight : values[0]).toTensor().scalar_type();
}

// Every operator that the device has no kernel of its own for.
inline void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const std::string& name = schema.name();
    std::size_t count = schema.arguments().size();
    Values arguments(stack->end() - count, stack->end());
    stack->erase(stack->end() - count, stack->end());
    Values metas;
    if (must_run_at_once(op) || !find_shapes(op, arguments, metas)) {
        run_now(op, arguments, stack);
        return;
    }
    std::vector<Tensor> results;
    std::vector<Tensor> targets; // one for each return; undefined where the return is an argument
    for (std::size_t index = 0; index < metas.size(); index++) {
        int argument = written_argument(schema, index);
        if (argument >= 0) {
            stack->push_back(arguments[argument]);
            targets.emplace_back();
            continue;
        }
        Tensor meta = metas[index].isTensor() ? metas[index].toTensor() : Tensor();
        Tensor result;
        if (meta.defined()) {
            auto options = meta.options().device(kDevice).dtype(result_type(name, index, meta, arguments));
            result = at::empty_strided(meta.sizes(), meta.strides(), options);
            results.push_back(result);
        }
        stack->push_back(result);
        targets.push_back(result.defined() ? behind(result) : Tensor());
    }
    double seconds = kernel_seconds(name, arguments, results);
    if (settings().hollow) {
        std::size_t written = 0, read = 0;
        auto write = [&](const Tensor& tensor) { written += tensor.defined() ? tensor.nbytes() : 0; };
        auto take = [&](const Tensor& tensor) { read += tensor.defined() ? tensor.nbytes() : 0; };
        std::for_each(results.begin(), results.end(), write);
        for (std::size_t i = 0; i < count; i++)
            if (is_written(schema.arguments()[i]))
                for_each_tensor(arguments[i], write);
            else
                for_each_tensor(arguments[i], take);
        if (written > kSmallBytes) {
            launch(kCompute, seconds, name, [] {});
            return;
        }
        if (read > kLargeBytes) { // a norm or a loss of what was never computed: zero, which is finite
            launch(kCompute, seconds, name, [targets = std::move(targets)]() mutable {
                for (Tensor& target : targets)
                    if (target.defined())
                        target.zero_();
            });
            return;
        }
    }
    Values host;
    for (auto& value : arguments)
        host.push_back(mapped(value, behind_if_on_device, at::kCPU));
    launch(kCompute, seconds, name, [op, host = std::move(host), targets = std::move(targets)]() mutable {
        op.callBoxed(&host);
        for (std::size_t index = 0; index < targets.size(); index++)
            if (targets[index].defined())
                targets[index].copy_(host[index].toTensor());
    });
}

// Copies #

// Looks after the host memory of a copy that the host does not wait for. What is written is poisoned when the copy is
// queued, so that a host that reads it early finds NaN; what is read must be the same when the copy runs. The copy is
// pending until this is destroyed, also if it fails or is never queued.
class HostSide {
  public:
    HostSide(const HostSide&) = delete;
    HostSide& operator=(const HostSide&) = delete;

    HostSide(const Tensor& host, bool written)
        : range_{static_cast<const char*>(host.data_ptr()), host.nbytes(), written} {
        bool in_use = pending_copies().touch(range_.begin, range_.nbytes, /*written_only=*/!written);
        if (written && !in_use && settings().poison && settings().copy)
            std::memset(host.data_ptr(), 0xff, host.nbytes());
        compares_ = !written && !in_use; // a copy that is queued before may write what this one reads
        if (compares_)
            before_ = checksum(range_.begin, range_.nbytes);
        pending_copies().add(range_);
    }

    ~HostSide() { pending_copies().remove(range_); }

    void before_run() const {
        if (compares_ && checksum(range_.begin, range_.nbytes) != before_)
            report_race("the host changed the source of a copy before it ran", range_.nbytes);
    }

  private:
    PendingCopies::Range range_;
    bool compares_ = false;
    std::uint64_t before_ = 0;
};

inline Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
    if (!source.numel())
        return target;
    double bytes = static_cast<double>(target.numel()) * static_cast<double>(target.itemsize());
    bool up = !on_device(source), down = !on_device(target);
    Tensor from = up ? source : behind(source), to = down ? target : behind(target);
    if (!up && !down) {
        double rate = settings().memory_rate;
        double seconds = (rate ? (bytes_of(source) + bytes) / rate : 0) + settings().launch_us * 1e-6;
        bool hollow = settings().hollow && target.nbytes() > kSmallBytes;
        launch(kCompute, seconds, "copy", [from, to, hollow]() mutable {
            if (!hollow)
                to.copy_(from);
        });
        return target;
    }
    const Tensor& host = up ? source : target;
    Pinning how =
        pinned().at(host.data_ptr(), at::detail::computeStorageNbytes(host.sizes(), host.strides(), host.itemsize()));
    bool host_blocks = !non_blocking || how == Pinning::pageable;
    if (how == Pinning::registered) // its owner must keep it; what torch has allocated is kept by what copies it
        (up ? from : to) = at::from_blob(host.data_ptr(), host.sizes(), host.strides(), host.options());
    std::shared_ptr<HostSide> watched;
    if (settings().check && !host_blocks && host.is_contiguous())
        watched = std::make_shared<HostSide>(host, down);
    double rate = down ? settings().d2h : settings().h2d;
    double seconds = (rate ? bytes / rate : 0) + settings().link_us * 1e-6;
    auto run = [from, to, watched = std::move(watched), copies = settings().copy != 0]() mutable {
        if (watched)
            watched->before_run();
        if (copies)
            to.copy_(from);
        watched.reset();
    };
    // It reads and writes as late as it can, so that nobody profits from a copy that is not done.
    launch(down ? kDown : kUp, seconds, down ? "d2h" : "h2d", std::move(run), /*late=*/seconds > 0);
    if (host_blocks)
        wait_on_host(current_stream);
    return target;
}

} // namespace infinity::simdev
