"""What can happen to whom, and when: the moments of a request, the faults, and one case of both.

A case runs 16 streams at once, one of them the *probe*. At a moment of the probe's life a fault
hits the worker that serves it (or the router). Then every answer is compared, token for token,
with that of an undisturbed cluster, and the cluster must come back to what it was."""

import random
import signal
import threading
import time

import cluster as cl
import field as fl

STREAMS = 16
ANSWER = 40  # tokens
PROBE_PROMPT = 360
SHORT_S, LONG_S = 0.35, 2.8  # shorter and longer than the silence that means dead
RETRY_S = 1.5  # the longest pause before an attempt (docs/lifecycle.md)
GOES_ON_S = 1.0  # from SIGKILL of a decode worker to its streams going on elsewhere: the median is below it
REUSED_AFTER = 3  # sets of prompts; by then the pools have forgotten them

# name, what is seen ("client": at the client), which one, seconds or share of the prefill phase after it
MOMENTS = (
    ("sent", "client", 0, 0.0),
    ("queued", "client", 0, 0.01),
    ("lease-asked", "LeaseRequest", 1, 0.0),
    ("promised", "LeaseReply", 1, 0.0),
    ("prefill-asked", "PrefillRequest", 1, 0.0),
    ("prefill-started", "PrefillStarted", 1, 0.0),
    ("bind", "Bind", 1, 0.0),
    ("bound", "LeaseReply", 2, 0.0),
    ("targets", "Targets", 1, 0.0),
    ("chunk-1", "PrefillRequest", 1, "0.1"),
    ("chunk-3", "PrefillRequest", 1, "0.45"),
    ("chunk-6", "PrefillRequest", 1, "0.9"),
    ("first-token-made", "StepTokens", 0, 0.0),
    ("first-token-read", "client", 1, 0.0),
    ("decode-asked", "DecodeStart", 1, 0.0),
    ("shipping", "DecodeStart", 1, 0.003),
    ("all-sent", "PrefillDone", 1, 0.0),
    ("landed", "Landed", 1, 0.0),
    ("released", "Release", 1, 0.0),
    ("second-token", "client", 2, 0.0),
    ("middle", "client", ANSWER // 2, 0.0),
    ("last-but-one", "client", ANSWER - 1, 0.0),
    ("last-token-made", "StepTokens", ANSWER - 1, 0.0),
)

# kill: started again at the same addresses, at once or (-stay) late; stop: SIGSTOP and SIGCONT; cut: its links are
# down and up again, cut-data: only the one of KV blocks; mute: only its messages wait (where there are no links to cut)
FAULTS = ("kill", "kill-stay", "stop-short", "stop-long", "cut-short", "cut-long", "cut-data")
FAULTS_OF = {"hosts": FAULTS, "tcp": ("kill", "stop-short", "stop-long", "mute-short", "mute-long"), "shm": ("kill", "kill-stay", "stop-short", "stop-long")}
VICTIMS = ("prefill", "decode", "router")


def all_cases(place):
    """[(fault, victim, moment)] of a place, a link's end only where there are links."""
    return [
        (fault, victim, moment[0])
        for fault in FAULTS_OF[place]
        for victim in VICTIMS
        for moment in MOMENTS
        if not (fault == "cut-data" and victim == "router")
    ]


def some_cases(place, count, rng):
    """A choice that has each fault as often as any other, and as many different victims as it can."""
    cases = all_cases(place)
    rng.shuffle(cases)
    chosen = []
    while len(chosen) < count:
        had = {key: sum(key in case for case in chosen) for key in {word for case in cases for word in case}}
        best = min(cases, key=lambda case: (had[case[0]], had[case[1]], had[case[2]]))
        chosen.append(best)
        cases.remove(best)
    return chosen


def prompts_of(seed, number):
    """The bodies of set number: the probe first."""
    rng = random.Random(f"{seed} set {number}")
    sizes = [PROBE_PROMPT, 120, 120, 120] + [rng.randrange(12, 48) for _ in range(STREAMS - 4)]
    bodies = []
    for index, size in enumerate(sizes):
        sampling = {"temperature": 0.8, "top_p": 0.95, "seed": rng.randrange(1 << 30)} if index % 3 == 2 else {}
        bodies.append(fl.asked([rng.randrange(100, 40000) for _ in range(size)], ANSWER, **sampling))
    if number % 2:
        bodies[0].update(temperature=0.8, top_p=0.95, seed=rng.randrange(1 << 30))
    return bodies


class Trigger:
    """Waits for the moment and acts, once. act() runs on the thread that saw it, so that what was
    seen has not gone on yet (or just has: after)."""

    def __init__(self, identity, moment, act, after, prefill_s):
        _, self.kind, self.which, delay = next(one for one in MOMENTS if one[0] == moment)
        self.delay_s = float(delay) * prefill_s if isinstance(delay, str) else delay
        self.identity, self.act, self.after = identity, act, after
        self.number, self.count = None, 0
        self.lock = threading.Lock()
        self.armed = True
        self.at = None
        self.prefill_asked = None
        self.done = threading.Event()

    def _fire(self):
        with self.lock:
            if not self.armed:
                return
            self.armed = False
        if self.delay_s > 0:
            timer = threading.Timer(self.delay_s, self._now)
            timer.daemon = True
            timer.start()
        else:
            self._now()

    def _now(self):
        self.at = time.monotonic()
        try:
            self.act()
        finally:
            self.done.set()

    def client(self, tokens):
        if self.kind == "client" and tokens >= self.which:
            self._fire()

    def seen(self, seen):
        """The tap's watcher: called before the message goes on, and again after it when told so."""
        if self.number is None:
            if seen.kind not in ("LeaseRequest", "PrefillRequest") or seen.text(2) != self.identity:
                return False
            self.number = seen.key()[1]
        if not self.armed or seen.kind != self.kind:
            return False
        if getattr(seen, "again", False):
            self._fire()
            return False
        if seen.kind == "StepTokens":
            hit = any(number == self.number and index >= self.which for number, index, _ in seen.tokens())
        else:
            hit = (seen.key() or (0, 0, 0))[1] == self.number
            self.count += hit
            hit = hit and self.count >= self.which
        if not hit:
            return False
        if self.after:
            seen.again = True
            return True
        self._fire()
        return False


class Report:
    """What all cases together showed, for the run's last lines."""

    def __init__(self):
        self.gaps_s = []  # from SIGKILL of a decode worker to the next token, made elsewhere
        self.waits_s = []
        self.patience = (0, "")  # the largest part of what is allowed that a stream waited, and under what
        self.growth = {"MiB": 0, "descriptors": 0, "threads": 0, "looks": 0}  # over what was held when warm
        self.whole = self.errors = self.cut = 0
        self.clean_s = []
        self.cases = 0
        self.lines = []
        self.counts = {}  # "what it is" -> {kind: how often}
        self.lock = threading.Lock()

    def count(self, what, kind, times=1):
        with self.lock:
            kinds = self.counts.setdefault(what, {})
            kinds[kind] = kinds.get(kind, 0) + int(times)

    KEPT = ("gaps_s", "waits_s", "patience", "growth", "whole", "errors", "cut", "clean_s", "cases", "counts")

    def kept(self):
        """All of it but its lines, as JSON can carry it: `sums.py` puts the parts of a run together."""
        return {name: getattr(self, name) for name in self.KEPT}

    def add(self, kept):
        """What another part's kept() gave."""
        for name in ("gaps_s", "waits_s", "clean_s"):
            getattr(self, name).extend(kept[name])
        for name in ("whole", "errors", "cut", "cases"):
            setattr(self, name, getattr(self, name) + kept[name])
        self.patience = max(self.patience, tuple(kept["patience"]))
        for kind, more in kept["growth"].items():
            self.growth[kind] = self.growth[kind] + more if kind == "looks" else max(self.growth[kind], more)
        for what, kinds in kept["counts"].items():
            for kind, times in kinds.items():
                self.count(what, kind, times)

    def text(self):
        lines = list(self.lines)
        for what, kinds in self.counts.items():
            lines.append(f"{what}: {sum(kinds.values())} ({', '.join(f'{kind} {times}' for kind, times in sorted(kinds.items()))})")
        if self.gaps_s:
            gaps = sorted(self.gaps_s)
            lines.append(
                f"from SIGKILL of a decode worker to the stream going on elsewhere: {len(gaps)} streams, median {gaps[len(gaps) // 2] * 1e3:.0f} ms, "
                f"p90 {gaps[min(len(gaps) - 1, len(gaps) * 9 // 10)] * 1e3:.0f} ms, max {gaps[-1] * 1e3:.0f} ms"
            )
        if self.cases:
            lines.append(
                f"{self.cases} faults under {STREAMS} streams: {self.whole} answers whole, {self.errors} clear errors, {self.cut} cut with their router; "
                f"longest silence in a stream {max(self.waits_s, default=0):.1f} s ({self.patience[0] * 100:.0f} % of what is allowed at most, {self.patience[1]}); "
                f"clean again within {max(self.clean_s, default=0):.1f} s"
            )
        if self.growth["looks"]:
            lines.append(
                f"held more than when warm, {self.growth['looks']} looks: at most {self.growth['MiB']:.1f} MiB, {self.growth['descriptors']} descriptors, "
                f"{self.growth['threads']} threads"
            )
        return lines


class Case:
    def __init__(self, field, fault, victim, moment, rng, report, prefill_s, quiet_s):
        """prefill_s, quiet_s: how long the probe's prefill takes, and a stream waits at most, when nothing happens."""
        self.field, self.fault, self.victim, self.moment = field, fault, victim, moment
        self.rng, self.report, self.prefill_s, self.quiet_s = rng, report, prefill_s, quiet_s
        self.name = None  # the service that is hit
        self.hit_at = None
        self.running = {}  # who decodes which stream when it hits
        self.healers = []

    # ---- the fault

    def _target(self, identity):
        if self.victim == "router":
            return "router"
        known = self.field.placed.get(identity, {})
        return known.get(self.victim) or f"{self.victim}-{self.rng.randrange(2)}"

    def _hit(self, identity, streams):
        field, name = self.field, self._target(identity)
        self.name = name
        long = self.fault.endswith("long") or self.fault in ("kill-stay", "cut-data")
        pause_s = LONG_S if long else SHORT_S
        service = field.services[name]
        if self.fault.startswith("kill"):
            service.held_down = self.fault == "kill-stay"
            field.kill(name)
            heal = lambda: setattr(service, "held_down", False)  # noqa: E731
        elif self.fault.startswith("stop"):
            field.stop(name)
            heal = lambda: field.go_on(name)  # noqa: E731
        elif self.fault.startswith("mute"):
            for one in field.services.values():
                one.excused = one.excused or name in (one.name, "router")  # given up, it must start anew
            field.tap.hold({name} if name != "router" else set(field.services))
            heal = lambda: field.tap.hold(())  # noqa: E731
        else:
            links = ("data0",) if self.fault == "cut-data" else ("ctl0", "data0")
            service.excused = True
            field.network.cut(name, links)
            heal = lambda: field.network.join(name)  # noqa: E731
        self.hit_at = time.monotonic()
        if self.fault.startswith("kill") and self.victim == "decode":
            self.running = {s.identity: len(s.tokens) for s in list(streams.values()) if field.placed.get(s.identity, {}).get("decode") == name}
        self.healer = threading.Timer(pause_s, heal)
        self.healer.daemon = True
        self.healer.start()

    # ---- the run

    def run(self, bodies, answers):
        field, rng = self.field, self.rng
        field.forget_requests()
        before = {name: (service.pid, service.starts) for name, service in field.services.items()}
        stamp = f"{self.fault}.{self.moment}.{rng.randrange(1 << 20):x}"
        probe = f"p.{stamp}"
        streams = {}
        trigger = Trigger(probe, self.moment, lambda: self._hit(probe, streams), rng.random() < 0.5, self.prefill_s)
        field.tap.watch(trigger.seen)
        starts = [0.25] + [rng.random() * 0.5 for _ in bodies[1:]]

        def ask(index):
            time.sleep(starts[index])
            identity = probe if index == 0 else f"o{index}.{stamp}"

            def register(stream, _):
                streams[identity] = stream
                if index == 0:
                    trigger.client(0)

            def on_token(stream):
                if index == 0:
                    trigger.client(len(stream.tokens))
                return False

            return field.stream(bodies[index], identity, on_token, register=register)

        try:
            results = fl.at_once([lambda index=index: ask(index) for index in range(len(bodies))])
            assert trigger.done.wait(5), f"the moment {self.moment} never came: {self._say(results[0])}"
            self.healer.join()
        finally:
            field.tap.forget(trigger.seen)
            self._heal()
        self._judge(results, answers)
        self._measure(results)
        self._afterwards(before)

    def _heal(self):
        for service in self.field.services.values():
            service.held_down = False
            self.field.signal(service.name, signal.SIGCONT)
        self.field.tap.hold(())
        if self.field.network is not None:
            self.field.network.join_all()

    # ---- the verdict

    def allowed_s(self):
        """How long a stream may be silent at most: what the deployment's deadlines say of this fault, and
        what any stream of so many may wait on a busy machine."""
        deadlines, lost_s = fl.DEADLINES, fl.LOST_AFTER_S
        long = self.fault.endswith("long")
        if self.victim == "router":
            # afterwards its workers are there, or have begun anew, or (given up by it) are started again
            seen_s = {"kill": 0, "stop": LONG_S + lost_s if long else SHORT_S}.get(self.fault.split("-")[0])
            if seen_s is None:
                seen_s = LONG_S + deadlines["queue"] if long else SHORT_S + lost_s
        elif self.fault == "cut-data":
            seen_s = deadlines["transfer"] + deadlines["lease"]  # nothing lands; the router waits for the worker to say so
        else:
            seen_s = lost_s  # another worker of its role is there
        return seen_s + RETRY_S + 2 * self.quiet_s + 1

    @staticmethod
    def _say(stream):
        return f"{stream.identity}: status {stream.status}, {len(stream.tokens)} tokens, finish {stream.finish}, error {stream.error}, cut '{stream.cut}', " \
               f"{stream.ended - stream.began:.1f} s"

    def _judge(self, results, answers):
        wrong = []
        for stream, want in zip(results, answers):
            self.report.waits_s.append(stream.longest_wait())
            if stream.tokens != want[: len(stream.tokens)]:
                at = next(i for i, token in enumerate(stream.tokens) if i >= len(want) or token != want[i])
                wrong.append(f"WRONG TOKENS from {at} on (made by {self._makers(stream)}): {self._say(stream)}\n  got  {stream.tokens}\n  want {want}")
            elif stream.error is None and not stream.cut:
                if stream.tokens != want or stream.finish != "length":
                    wrong.append(f"ended short, as if whole: {self._say(stream)}")
                self.report.whole += 1
            elif stream.cut:
                self.report.cut += 1
                if not (self.victim == "router" and self.fault.startswith("kill")):
                    wrong.append(f"cut without a word: {self._say(stream)}")
            else:
                self.report.errors += 1
                if stream.status not in (200, 429, 503, 504) or not stream.error.get("message"):
                    wrong.append(f"no clear error: {self._say(stream)}")
                elif self.victim != "router":
                    wrong.append(f"it could have gone on elsewhere: {self._say(stream)}")
            allowed_s = self.allowed_s()
            self.report.patience = max(self.report.patience, (stream.longest_wait() / allowed_s, f"{self.fault} of {self.victim}"))
            if stream.ended - stream.began > fl.DEADLINES["total"] or stream.longest_wait() > allowed_s:
                wrong.append(f"waited too long: {stream.longest_wait():.1f} s, {allowed_s:.1f} s are allowed; {self._say(stream)}")
        assert not wrong, f"{self.fault} of {self.name} at {self.moment}:\n" + "\n".join(wrong)

    def _makers(self, stream):
        number = self.field.placed.get(stream.identity, {}).get("number")
        return [self.field.makers.get((number, index), "?") for index in range(len(stream.tokens))]

    def _measure(self, results):
        """Only streams that had begun there: the first token that somebody else made."""
        for stream in results:
            had = self.running.get(stream.identity, 0)
            if had == 0 or had >= ANSWER:
                continue
            number = self.field.placed[stream.identity]["number"]
            for index in range(had, len(stream.tokens)):
                if self.field.makers.get((number, index)) != self.name and stream.times[index] > self.hit_at:
                    self.report.gaps_s.append(stream.times[index] - self.hit_at)
                    break

    def _afterwards(self, before):
        field = self.field
        began = time.monotonic()
        if self.fault.startswith("kill"):
            cl.wait_until(lambda: field.services[self.name].starts > before[self.name][1], 10, f"{self.name} was not started again")
        field.wait_ready(20)
        field.assert_clean(15)
        self.report.clean_s.append(time.monotonic() - began)
        for name, (pid, starts) in before.items():
            service = field.services[name]
            if self.victim == "router" and self.fault.startswith(("cut", "mute")) and name != "router":
                pass  # the router has given up all of them: they are told so and start anew
            elif name != self.name:
                assert (service.pid, service.starts) == (pid, starts), f"{name} did not live through the end of {self.name}: {service.ends}"
            elif self.fault.startswith("kill"):
                assert service.starts == starts + 1, f"{name} was started {service.starts - starts} times: {service.ends}"
                assert all(excused for _, excused in service.ends), f"{name} ended by itself: {service.ends}"
            service.excused = False
            service.ends.clear()
        # the largest that the cluster takes, through any pair of workers
        full = fl.asked([self.rng.randrange(100, 40000) for _ in range(fl.CONTEXT - 4)], 3)
        began = time.monotonic()
        status, body = field.complete(full, f"full.{self.rng.randrange(1 << 20):x}")
        took = time.monotonic() - began
        assert took < 10, f"a full-size request took {took:.1f} s: {field.placed}"
        assert status == 200 and len(body["choices"][0]["token_ids"]) == 3, f"a full-size request: {status} {body}"
        self.report.cases += 1
        self.report.count("faults by kind", self.fault)
        self.report.count("faults by place and victim", f"{field.place} {self.victim}")
