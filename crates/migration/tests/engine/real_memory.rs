//! Real memory, written by several threads while it is migrated: races that the single-threaded
//! simulation cannot show.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver as Queue, Sender, channel};
use std::sync::{Arc, Mutex, RwLock};

use ebb_abi::{PAGE_SIZE_BYTES, PageRange, Pfn};
use ebb_guest_ram::testing::TestMerger;
use ebb_guest_ram::{Backing, GuestRam, HugePages, Populate, RegionSpec};
use ebb_migration::testing::{Link, NoWrites, Random, link};
use ebb_migration::{
    BoxError, Cancel, Config, FreePageSource, Guest, HintReceiver, HintRounds, Precopy, Receiver,
    SourceMemory, Switchover, WithWriteLog,
};
use vm_memory::GuestAddress;

const MEMORY_BYTES: u64 = 8 << 20;
const PAGES: u64 = MEMORY_BYTES / PAGE_SIZE_BYTES;
const THREADS: u64 = 3;

fn ram(backing: Backing) -> Arc<GuestRam> {
    let specs = [0, MEMORY_BYTES / 2].map(|start| RegionSpec {
        start: GuestAddress(start),
        size_bytes: MEMORY_BYTES / 2,
        host_node: None,
    });
    Arc::new(GuestRam::new(&specs, backing, HugePages::Off, Populate::Lazy).unwrap())
}

/// State shared by the threads.
struct Machine {
    ram: Arc<GuestRam>,
    /// Held by a thread in each of its steps; taken to stop them.
    running: RwLock<()>,
    over: AtomicBool,
    steps_left: AtomicU64,
    hints: Mutex<Option<HintReceiver>>,
    /// Whether a page is in use; a page belongs to one thread.
    used: Vec<AtomicBool>,
}

impl Machine {
    fn write(&self, page: u64, value: u8) {
        let content = vec![value; PAGE_SIZE_BYTES as usize];
        self.ram.write_pages(PageRange::new(Pfn(page), 1), &content).unwrap();
        self.used[page as usize].store(true, Ordering::SeqCst);
    }

    /// A thread of the guest: writes, frees and hints pages, inflates some into the balloon, and
    /// uses them again.
    fn live(&self, thread: u64, device: &Sender<(HintReceiver, PageRange)>) {
        let mut random = Random::new(thread + 1);
        loop {
            let _running = self.running.read().unwrap();
            // Checked with the lock held: a thread that waited for it must not continue at the
            // source.
            if self.over.load(Ordering::SeqCst) || self.steps_left.load(Ordering::SeqCst) == 0 {
                break;
            }
            let less = |left: u64| Some(left.saturating_sub(1));
            let _ = self.steps_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
            let page = random.below(PAGES / THREADS) * THREADS + thread;
            let range = PageRange::new(Pfn(page), 1);
            let used = self.used[page as usize].load(Ordering::SeqCst);
            match random.below(8) {
                0..2 if used => {
                    let hints = self.hints.lock().unwrap().clone();
                    if let Some(hints) = hints {
                        self.used[page as usize].store(false, Ordering::SeqCst);
                        device.send((hints, range)).unwrap();
                    }
                }
                2 if used => {
                    self.ram.discard(&[range]).unwrap();
                }
                _ => self.write(page, random.below(3) as u8),
            }
        }
    }
}

/// The device's thread: passes hints on with a delay.
fn pass_on(hints: &Queue<(HintReceiver, PageRange)>) {
    while let Ok((receiver, range)) = hints.recv() {
        std::thread::yield_now();
        receiver.hint(&[range]);
    }
}

struct Stops<'a>(&'a Machine, Option<std::sync::RwLockWriteGuard<'a, ()>>);

impl Guest for Stops<'_> {
    fn flush(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    fn pause_and_save(&mut self) -> Result<(), BoxError> {
        self.1 = Some(self.0.running.write().map_err(|_| "a thread has failed")?);
        Ok(())
    }

    fn resume(&mut self) -> Result<(), BoxError> {
        self.1 = None;
        Ok(())
    }

    fn throttle(&mut self, _percent: u8) -> Result<(), BoxError> {
        Ok(())
    }
}

struct Driver<'a>(&'a Machine);

impl FreePageSource for Driver<'_> {
    fn start(&mut self, hints: HintReceiver) -> Result<(), BoxError> {
        *self.0.hints.lock().unwrap() = Some(hints);
        Ok(())
    }

    fn stop(&mut self) {
        *self.0.hints.lock().unwrap() = None;
    }

    fn finish(&mut self) {}
}

fn page(ram: &GuestRam, page: u64) -> Vec<u8> {
    let mut bytes = vec![0; PAGE_SIZE_BYTES as usize];
    ram.read_pages(PageRange::new(Pfn(page), 1), &mut bytes).unwrap();
    bytes
}

/// Whether pages of the source and of the target are merged meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Merging {
    Neither,
    AtBothEnds,
}

/// Returns a merger for the pages of `ram`, if merging is possible here.
fn merger(ram: &Arc<GuestRam>) -> Option<TestMerger> {
    TestMerger::new(ram).inspect_err(|error| println!("merging is not possible here: {error}")).ok()
}

/// Merges all pages repeatedly until the migration is over. Returns the number of pages merged.
fn merge(mut merger: TestMerger, over: &AtomicBool) -> u64 {
    let mut merged = 0;
    while !over.load(Ordering::SeqCst) {
        merged += merger.merge(PageRange::new(Pfn(0), PAGES)).unwrap();
    }
    merged
}

fn migrate(backing: Backing, merging: Merging) {
    let machine = Machine {
        ram: ram(backing),
        running: RwLock::new(()),
        over: AtomicBool::new(false),
        steps_left: AtomicU64::new(60_000),
        hints: Mutex::default(),
        used: (0..PAGES).map(|_| AtomicBool::new(true)).collect(),
    };
    (0..PAGES / 2).for_each(|page| machine.write(page, 9));
    let target = ram(backing);
    let mut mergers = Vec::new();
    if merging == Merging::AtBothEnds {
        let Some(mut of_source) = merger(&machine.ram) else { return };
        // All pages that are sent in the first round.
        assert_eq!(of_source.merge(PageRange::new(Pfn(0), PAGES)).unwrap(), PAGES / 2);
        mergers = vec![Some(of_source), merger(&target)];
    }
    let (cancel, target_cancel) = (Cancel::new(), Cancel::new());
    let Link { send, receive, mut rounds, mut confirm } =
        link(2, None, &cancel, &target_cancel).unwrap();
    let (report, merged) = std::thread::scope(|scope| {
        let mergers: Vec<_> = mergers
            .into_iter()
            .flatten()
            .map(|merger| {
                let over = &machine.over;
                scope.spawn(move || merge(merger, over))
            })
            .collect();
        let (to_device, hints) = channel();
        for thread in 0..THREADS {
            let (machine, to_device) = (&machine, to_device.clone());
            scope.spawn(move || machine.live(thread, &to_device));
        }
        drop(to_device);
        scope.spawn(move || pass_on(&hints));
        scope.spawn(|| {
            let receiver = Receiver {
                memory: &*target,
                streams: receive
                    .into_iter()
                    .map(|stream| Box::new(stream) as Box<dyn Read + Send>)
                    .collect(),
                round_done: &mut |round| Ok(confirm.write_all(&round.to_le_bytes())?),
                cancel: target_cancel,
            };
            receiver.run().unwrap();
        });
        let config = Config {
            downtime_limit: std::time::Duration::ZERO,
            hint_wait: std::time::Duration::from_millis(1),
            hint_rounds: HintRounds::Every,
            ..Config::default()
        };
        let precopy = Precopy {
            config,
            memory: &*machine.ram as &dyn SourceMemory,
            dirty: &mut WithWriteLog::new(NoWrites, Arc::clone(&machine.ram)),
            guest: &mut Stops(&machine, None),
            free_pages: Some(&mut Driver(&machine)),
            streams: send.into_iter().map(|wire| Box::new(wire) as Box<dyn Write + Send>).collect(),
            round_sync: &mut rounds,
            observer: &mut |_| {},
            cancel,
        };
        let report = precopy.run().map(Switchover::complete);
        machine.over.store(true, Ordering::SeqCst);
        let merged: Vec<u64> = mergers.into_iter().map(|merger| merger.join().unwrap()).collect();
        (report.unwrap(), merged)
    });
    assert!(merged.iter().all(|pages| *pages > 0), "{merged:?}");
    assert!(report.rounds > 2, "{report:?}");
    for number in 0..PAGES {
        if machine.used[number as usize].load(Ordering::SeqCst) {
            assert!(
                page(&machine.ram, number) == page(&target, number),
                "page {number:#x} differs with {backing}, merged by {merging:?}"
            );
        }
    }
}

#[test]
fn memory_that_is_written_meanwhile_arrives() {
    migrate(Backing::Anonymous, Merging::Neither);
    migrate(Backing::Memfd, Merging::Neither);
}

#[test]
fn memory_that_is_merged_meanwhile_arrives() {
    migrate(Backing::Anonymous, Merging::AtBothEnds);
}
