"""The ranks of a pipeline as threads of one process, and the messages between them."""

import threading


class Mail:
    """Messages between threads, in order within each direction of a pair of ranks."""

    def __init__(self):
        self._arrived, self._changed = {}, threading.Condition()

    def box(self, rank):
        return Box(self, rank)

    def put(self, line, tensor):
        with self._changed:
            self._arrived.setdefault(line, []).append(tensor)
            self._changed.notify_all()

    def take(self, line, number):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._arrived.get(line, [])) > number, timeout=20), (
                "nothing comes"
            )
            tensor, self._arrived[line][number] = self._arrived[line][number], None
            return tensor


class Box:
    def __init__(self, mail, rank):
        self._mail, self._rank, self._asked = mail, rank, {}

    def send(self, tensor, peer, name):
        self._mail.put((self._rank, peer), tensor.clone())

    def receive(self, shape, dtype, peer, name):
        line = (peer, self._rank)
        number = self._asked[line] = self._asked.get(line, -1) + 1
        return Coming(self._mail, line, number)

    def flush(self):
        pass


class Coming:
    def __init__(self, mail, line, number):
        self._mail, self._line, self._number = mail, line, number

    def take(self):
        return self._mail.take(self._line, self._number)


def in_threads(work, ranks):
    """The results of work(rank), each rank in a thread; the first error is raised."""
    errors, found = [], [None] * ranks

    def run(rank):
        try:
            found[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return found
