"""Kill -9 of every service in turn, and of workers, while tasks run."""

from penstock.local.deployment import SERVICES
from tests.chaos.scenario import TASKS, run_scenario


async def test_killed_services_and_workers_lose_no_task(tmp_path):
    """O1, W4, design's guarantees 2, 3 and 6: all tasks succeed after the kill of any process, no
    stage takes effect twice, no event is lost, and the check is clean."""
    async with run_scenario(tmp_path, "kill") as scenario:
        groups = scenario.groups([*SERVICES, "worker", "worker"], at_once=4)
        for group in groups:

            async def inject(group: list[str] = group) -> None:
                for victim in group:
                    if victim == "worker":
                        scenario.workers.kill(scenario.rng.choice(scenario.workers.running))
                        scenario.workers.start()
                    else:
                        scenario.kill(victim)

            await scenario.wave(f"kill -9 {', '.join(group)}", inject, tasks=TASKS // len(groups))
