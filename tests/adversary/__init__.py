"""An adversarial runtime of asynchronous work on the CPU: every order that is not promised is used, and races are
named.

[Note: the model]
It has CUDA's rules, whatever the device. The compute of the main thread, its host code, every host job and every operation
or transfer in flight are *agents*. What an agent does is in order; what two agents do is ordered by events alone:
- An operation begins after the host code that submitted it, and after all compute before it or, with `after`, after those
  works alone. `mark` is the compute before it.
- `wait` orders the compute of the caller behind an operation, not the host. `synchronize` orders both.
- Of the operations of one stream nothing is ordered but the steps of those that communicate, see core/streams/stream.py.
Every kernel and every transfer is recorded with the bytes that it reads and writes (watch.py, memory.py). Two accesses to
one byte, one of them a write, that no event orders are a race, whether or not it showed in this run.

[Note: the modes] "late": a function on a stream runs, and a message or the last step of an operation arrives, when
something waits for it. Until then a tensor that receives is full of NaN. So a missing wait changes numbers, too.
"shuffled": pending functions run, and operations end, at random moments and in random order, drawn from a seed.
Messages are always posted when they are submitted, and all steps but the last are taken when their messages are there.
So no rank waits for another for longer than without this runtime, and it adds no deadlock. The last step of an
operation is known from the second time that one of its name and stream runs.

Tests install it with `adversary` (seams.py) for the duration of a function. megatron/ knows nothing of it.
"""
