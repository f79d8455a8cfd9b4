//! One complete migration.

use std::io::{Read, Write};
use std::time::Duration;

use ebb_abi::{PageRange, Pfn};
use ebb_migration::testing::{
    Activity, Cut, Hooks, Link, SimDirty, SimGuest, SimHints, SimMemory, TestTarget, link,
};
use ebb_migration::{
    Cancel, Config, Failure, FreePageSource, Precopy, Progress, ReceiveError, ReceiveReport,
    Receiver, Report,
};

/// Memory of the simulated guest.
pub const REGIONS: [PageRange; 3] =
    [PageRange::new(Pfn(0), 150), PageRange::new(Pfn(150), 70), PageRange::new(Pfn(1000), 137)];

/// Whether the guest can give free page hints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hints {
    Asked,
    Off,
}

/// Parameters of a migration.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    pub seed: u64,
    pub config: Config,
    pub activity: Activity,
    pub streams: usize,
    pub hints: Hints,
    pub cut: Option<Cut>,
}

impl Default for Trial {
    fn default() -> Self {
        let config = Config {
            // Rounds continue as long as any page is written.
            downtime_limit: Duration::ZERO,
            hint_wait: Duration::from_millis(1),
            chunk_pages: 16,
            ..Config::default()
        };
        let activity = Activity { steps: 500, burst: 2, cancel_after: None };
        Self { seed: 1, config, activity, streams: 1, hints: Hints::Asked, cut: None }
    }
}

/// Outcome of a migration.
pub struct Outcome {
    pub hooks: Hooks,
    pub target: TestTarget,
    pub sent: Result<Report, Box<Failure>>,
    pub received: Result<ReceiveReport, ReceiveError>,
    pub progress: Vec<Progress>,
}

impl Trial {
    pub fn run(self) -> Outcome {
        let (cancel, target_cancel) = (Cancel::new(), Cancel::new());
        let hooks = Hooks::new(&REGIONS, self.seed, self.activity, &cancel);
        let target = TestTarget::new(&REGIONS);
        let Link { send, receive, mut rounds, mut confirm } =
            link(self.streams, self.cut, &cancel, &target_cancel).unwrap();
        let mut progress = Vec::new();
        let (sent, received) = std::thread::scope(|scope| {
            let destination = scope.spawn(|| {
                let streams =
                    receive.into_iter().map(|stream| Box::new(stream) as Box<dyn Read + Send>);
                let receiver = Receiver {
                    memory: &target,
                    streams: streams.collect(),
                    round_done: &mut |round| Ok(confirm.write_all(&round.to_le_bytes())?),
                    cancel: target_cancel.clone(),
                };
                let result = receiver.run();
                if result.is_err() {
                    // Like a monitor that ends.
                    target_cancel.cancel();
                }
                result
            });
            let mut free_pages = SimHints(hooks.clone());
            let free_pages: &mut dyn FreePageSource = &mut free_pages;
            let precopy = Precopy {
                config: self.config,
                memory: &SimMemory(hooks.clone()),
                dirty: &mut SimDirty(hooks.clone()),
                guest: &mut SimGuest(hooks.clone()),
                free_pages: (self.hints == Hints::Asked).then_some(free_pages),
                streams: send
                    .into_iter()
                    .map(|wire| Box::new(wire) as Box<dyn Write + Send>)
                    .collect(),
                round_sync: &mut rounds,
                observer: &mut |step| progress.push(*step),
                cancel: cancel.clone(),
            };
            let sent = precopy.run().map(ebb_migration::Switchover::complete);
            if sent.is_err() {
                cancel.cancel();
            }
            (sent, destination.join().unwrap())
        });
        Outcome { hooks, target, sent, received, progress }
    }
}

impl Outcome {
    /// Checks that the guest's used pages have arrived; returns the number of free pages.
    pub fn check_moved(&self) -> u64 {
        let world = self.hooks.world();
        world.check_moved(&|page, bytes| self.target.read(page, bytes))
    }

    /// Checks that the guest has either arrived, or continues at the source and both ends report a
    /// failure.
    pub fn check_whole(&self) {
        match &self.sent {
            Ok(_) => {
                assert!(self.received.is_ok(), "{:?}", self.received);
                self.check_moved();
            }
            Err(_) => self.hooks.world().check_unharmed(),
        }
    }
}
