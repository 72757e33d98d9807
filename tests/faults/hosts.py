"""Several hosts on one machine: network namespaces that are joined by veth pairs.

Every host has two links, as machines of a cluster often have: `ctl0` (HTTP, ZeroMQ) and `data0` (KV
blocks), each to a bridge in a namespace of its own, which plays the switch. Links are cut and
joined again at the switch's end, as when somebody pulls a cable. Nothing of the machine's own
network is touched: who wants to speak to a host makes sockets inside it (`Host.socket`). Services
get a process namespace of their own too, so that no pid of one host means anything on another.

Namespaces are named kvf-PID-...: those of a test run that was killed go when the next one starts."""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
import time

PREFIX = "kvf-"
CLONE_NEWNET = 0x40000000
LINKS = {"ctl0": "10.71.0", "data0": "10.72.0"}


def ip(*words):
    """Runs ip; its complaint is the exception's text."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def why_not():
    """Why there can be no namespaces here; "" when there can."""
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    name = f"{PREFIX}{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        try:
            ip("-n", name, "link", "add", "name", "br", "type", "bridge")
            ip("-n", name, "link", "add", "name", "a", "type", "veth", "peer", "name", "b")
            subprocess.run(
                ["ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--mount-proc", "true"],
                capture_output=True, check=True, timeout=30,
            )
        finally:
            ip("netns", "del", name)
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces are not allowed: {error}"
    return ""


def sweep():
    """Removes what runs that are dead have left."""
    with contextlib.suppress(OSError):
        for line in ip("netns", "list").splitlines():
            name = line.split()[0]
            parts = name.split("-")
            if name.startswith(PREFIX) and parts[1].isdigit() and not os.path.exists(f"/proc/{parts[1]}"):
                with contextlib.suppress(OSError):
                    ip("netns", "del", name)


def _in_namespace(name, function):
    """function() on a thread that has entered the namespace; a socket stays in the one it was made in."""
    result = []

    def work():
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/run/netns/{name}", "rb") as file:
                if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"setns {name}")
            result.append(function())
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(result[0], OSError):
        raise result[0]
    return result[0]


class Host:
    def __init__(self, name, number):
        self.name, self.number = name, number
        self.address = f"{LINKS['ctl0']}.{number}"

    def command(self, words):
        """The command line that runs words on this host; the last child of it is the program."""
        return ["ip", "netns", "exec", self.name, "unshare", "--pid", "--fork", "--mount-proc", "--kill-child=KILL", *words]

    def socket(self):
        return _in_namespace(self.name, lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))


class Network:
    """Hosts by name; `cut` and `join` act on one link of one host, or on both."""

    made = 0  # networks of this process: several may be there at a time

    def __init__(self, names):
        Network.made += 1
        mark = f"{PREFIX}{os.getpid()}-{Network.made}"
        self.switch = f"{mark}-switch"
        self.hosts = {name: Host(f"{mark}-{name}", index + 1) for index, name in enumerate(names)}
        try:
            self._make()
        except BaseException:
            self.remove()
            raise

    def _make(self):
        ip("netns", "add", self.switch)
        for link in LINKS:
            ip("-n", self.switch, "link", "add", "name", f"br-{link}", "type", "bridge")
            ip("-n", self.switch, "link", "set", f"br-{link}", "up")
        for host in self.hosts.values():
            ip("netns", "add", host.name)
            ip("-n", host.name, "link", "set", "lo", "up")
            for link, net in LINKS.items():
                port = self._port(host, link)
                ip("-n", self.switch, "link", "add", "name", port, "type", "veth", "peer", "name", link, "netns", host.name)
                ip("-n", self.switch, "link", "set", port, "master", f"br-{link}")
                ip("-n", self.switch, "link", "set", port, "up")
                ip("-n", host.name, "address", "add", f"{net}.{host.number}/24", "dev", link)
                ip("-n", host.name, "link", "set", link, "up")
        self.wait_running()

    @staticmethod
    def _port(host, link):
        return f"{link}-{host.number}"

    def wait_running(self):
        """UCX knows no device that does not run yet; it takes up to a second after `up`."""
        end = time.monotonic() + 20
        for host in self.hosts.values():
            for link in LINKS:
                while "LOWER_UP" not in ip("-n", host.name, "link", "show", link):
                    if time.monotonic() > end:
                        raise OSError(f"{host.name}: {link} does not run")
                    time.sleep(0.02)

    def shape(self, name, rate):
        """What a host sends on its data link takes its time from now on, such as "200mbit"."""
        host = self.hosts[name]
        done = subprocess.run(
            ["tc", "-n", host.name, "qdisc", "replace", "dev", "data0", "root", "tbf", "rate", rate, "burst", "128k", "latency", "400ms"],
            capture_output=True, text=True, check=False, timeout=30,
        )
        return done.returncode == 0

    def cut(self, name, links=tuple(LINKS)):
        for link in links:
            ip("-n", self.switch, "link", "set", self._port(self.hosts[name], link), "down")

    def join(self, name, links=tuple(LINKS)):
        for link in links:
            ip("-n", self.switch, "link", "set", self._port(self.hosts[name], link), "up")

    def join_all(self):
        for name in self.hosts:
            self.join(name)

    def remove(self):
        for name in [host.name for host in self.hosts.values()] + [self.switch]:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                ip("netns", "del", name)
