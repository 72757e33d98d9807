"""Workers of a host share one copy of the packed weights, and a damaged one is nobody's weights."""

import os

import cluster as cl

QUESTION = [(number * 7919) % 40000 + 100 for number in range(40)]


def packs(one):
    folder = os.path.join(one.path, "weights")
    return [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pack")]


def mapped_by(one):
    """{worker: the packs that it has mapped}"""
    found = {}
    for worker in one.workers():
        with open(f"/proc/{worker['pid']}/maps", encoding="utf-8") as file:
            found[worker["name"]] = {line.split()[-1] for line in file if ".pack" in line}
    return found


def told(one, words):
    """Lines of this start's logs."""
    return sum(words in line for text in one.logs().values() for line in text.splitlines())


def test_workers_share_one_copy_which_the_next_start_takes_and_damage_is_made_anew():
    with cl.Cluster(workers=3, ratio="2:1") as one:
        one.down()
        with open(one.file, encoding="utf-8") as file:
            text = file.read()
        weights = os.path.join(one.path, "weights")
        changed = text.replace(os.path.join(cl.ROOT, ".cache", "weights"), weights)
        assert changed != text
        with open(one.file, "w", encoding="utf-8") as file:
            file.write(changed)

        one.up()
        found = packs(one)
        assert len(found) == 1
        assert mapped_by(one) == {name: set(found) for name in ("prefill-0", "prefill-1", "decode-0")}
        assert told(one, 'msg="weights" packed=made') == 1
        first = one.complete(QUESTION, 8, ignore_eos=True)
        one.down()

        one.up()
        assert told(one, 'msg="weights" packed=kept') == 3
        assert one.complete(QUESTION, 8, ignore_eos=True).token_ids == first.token_ids
        one.down()

        os.chmod(found[0], 0o600)
        with open(found[0], "r+b") as file:
            file.seek(20_000_000)
            file.write(bytes(4096))
        one.up()
        assert told(one, "its bytes are damaged") >= 1
        assert told(one, 'msg="weights" packed=made') == 1
        assert packs(one) == found
        assert one.complete(QUESTION, 8, ignore_eos=True).token_ids == first.token_ids


def test_workers_pack_their_own_where_nothing_can_be_kept():
    with cl.Cluster(model={"cache_dir": "/proc/no/such/folder"}) as one:
        assert all(not names for names in mapped_by(one).values())
        assert told(one, "the folder cannot be made") == 2
        assert told(one, 'msg="weights" packed=private') == 2
        assert len(one.complete(QUESTION, 4, ignore_eos=True).token_ids) == 4
