// Loops over threads: a pool that sleeps when there is nothing to do.
//
// A loop is cut into parts that depend on one another in nothing, and whoever is free claims the next part: a thread that
// the machine gives no time holds nobody up but by the part in its hands. A part computes the same numbers wherever it
// runs, and sums over parts are added in the order of the parts: no bit depends on the number of threads. (Threads that
// meet at barriers and spin there, as OpenMP's do, take 30 to 90 times as long where anything shares the machine.)
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

class Pool {
   public:
    // work(p) for every p < parts, on the calling thread and at most `helpers` others; returns when all are done. A
    // second caller at the same time works alone. Not from inside `work`.
    void run(long helpers, long parts, const std::function<void(long)>& work) {
        std::unique_lock<std::mutex> own(busy_, std::try_to_lock);
        if (!own) {
            for (long p = 0; p < parts; p++) work(p);
            return;
        }
        next_ = 0;
        {
            std::lock_guard<std::mutex> guard(lock_);
            grow(helpers);
            work_ = &work;
            parts_ = parts;
            wanted_ = helpers;
        }
        for (long n = 0; n < helpers; n++) wake_.notify_one();
        claim(work, parts);
        // A helper that has not come by now is not needed: it would find no part.
        std::unique_lock<std::mutex> guard(lock_);
        wanted_ = 0;
        guard.unlock();
        for (long n = 0; n < YIELDS && inside_ > 0; n++) std::this_thread::yield();
        guard.lock();
        done_.wait(guard, [this] { return inside_ == 0; });
    }

   private:
    static constexpr long YIELDS = 50;  // some 20 microseconds: parts of one size end together, and to sleep costs as much

    void claim(const std::function<void(long)>& work, long parts) {
        for (long p = next_++; p < parts; p = next_++) work(p);
    }

    // Threads as far as the system gives them: the caller does what nobody else does.
    void grow(long helpers) {
        try {
            for (; size_ < helpers; size_++) std::thread([this] { help(); }).detach();
        } catch (const std::system_error&) {
        }
    }

    void help() {
        std::unique_lock<std::mutex> guard(lock_);
        for (;;) {
            wake_.wait(guard, [this] { return wanted_ > 0; });
            wanted_--;
            inside_++;
            const std::function<void(long)>& work = *work_;
            long parts = parts_;
            guard.unlock();
            claim(work, parts);
            guard.lock();
            if (--inside_ == 0) done_.notify_one();
        }
    }

    std::mutex busy_, lock_;
    std::condition_variable wake_, done_;
    const std::function<void(long)>* work_ = nullptr;
    std::atomic<long> next_{0}, inside_{0};
    long parts_ = 0, wanted_ = 0, size_ = 0;
};

static std::atomic<Pool*> the_pool{nullptr};

// The process's pool. It is never destroyed, as its threads sleep in it to the end. A forked child has none of the
// threads, so it forgets the pool and makes its own.
static Pool& pool() {
    static std::once_flag is_watched;
    std::call_once(is_watched, [] { pthread_atfork(nullptr, nullptr, [] { the_pool = nullptr; }); });
    Pool* here = the_pool;
    if (!here) {
        Pool* made = new Pool;
        if (the_pool.compare_exchange_strong(here, made))
            here = made;
        else
            delete made;
    }
    return *here;
}

// work(first, last) for [0, part), [part, 2 part), ... of `count`; parts are the same for every number of threads.
template <class Work>
static void in_parts(long threads, long count, long part, const Work& work) {
    long parts = (count + part - 1) / part, helpers = (threads < parts ? threads : parts) - 1;
    auto one = [&](long p) { work(p * part, (p + 1) * part < count ? (p + 1) * part : count); };
    if (helpers > 0)
        pool().run(helpers, parts, one);
    else
        for (long p = 0; p < parts; p++) one(p);
}
