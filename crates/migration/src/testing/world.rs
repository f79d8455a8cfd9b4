//! The simulated guest.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_abi::{PAGE_SIZE_BYTES, PageRange, Pfn};
use ebb_guest_ram::PageBitmap;

use crate::{BoxError, Cancel, DirtySource, FreePageSource, Guest, HintReceiver, SourceMemory};

/// Pseudo-random numbers from a seed (xorshift64*, Vigna 2016).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts from a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns a number below `limit`, which must not be 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % limit
    }
}

/// Owner of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// The guest; its content matters.
    Used,
    /// No owner in the guest.
    Free,
    /// The driver, which has hinted it as free or is about to.
    Hinted,
    /// The balloon.
    Ballooned,
}

#[derive(Clone, Copy, Debug)]
struct Page {
    usage: Use,
    /// Its content, see [`page_bytes`].
    value: u64,
    held: bool,
    /// Mark in the vCPUs' log.
    marked: bool,
    /// Mark in the monitor's log.
    logged: bool,
}

/// Writes the content that `value` stands for; 0 is a page of zeros.
pub fn page_bytes(value: u64, bytes: &mut [u8]) {
    if value == 0 {
        bytes.fill(0);
        return;
    }
    for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
        // Mostly zero, so that zero detection has to scan the whole page.
        let number = if index as u64 == value % 512 { value } else { 0 };
        word.copy_from_slice(&number.to_le_bytes());
    }
}

/// Amount of activity in the simulated guest.
#[derive(Clone, Copy, Debug)]
pub struct Activity {
    /// Total number of steps, after which the guest is idle.
    pub steps: u64,
    /// Most steps per access of the engine.
    pub burst: u64,
    /// Number of steps after which the migration is cancelled.
    pub cancel_after: Option<u64>,
}

/// The guest and its surroundings.
#[derive(Debug)]
pub struct World {
    regions: Vec<PageRange>,
    pages: Vec<Page>,
    random: Random,
    activity: Activity,
    cancel: Cancel,
    next_value: u64,
    armed: bool,
    paused: bool,
    /// The guest's data was written back since the last round.
    flushed: bool,
    throttle_percent: u8,
    hints: Option<HintReceiver>,
    /// Pages hinted and not handled by the device yet.
    queue: VecDeque<PageRange>,
    /// Hints of earlier requests that a thread of the device has not passed on yet.
    late: Vec<(HintReceiver, PageRange)>,
    /// Pages changed by the monitor and not logged yet.
    unlogged: Vec<usize>,
}

/// A shared handle to the world.
#[derive(Clone, Debug)]
pub struct Hooks(Arc<Mutex<World>>);

impl Hooks {
    /// Creates a guest with memory in these regions; about half of its pages are used, most of them
    /// with content.
    pub fn new(regions: &[PageRange], seed: u64, activity: Activity, cancel: &Cancel) -> Self {
        let mut random = Random::new(seed);
        let mut next_value = 1;
        let total: u64 = regions.iter().map(|region| region.pages).sum();
        let pages = (0..total)
            .map(|_| {
                let usage = if random.below(2) == 0 { Use::Used } else { Use::Free };
                let held = random.below(4) != 0;
                next_value += 1;
                let value = if held && random.below(5) != 0 { next_value } else { 0 };
                Page { usage, value, held, marked: false, logged: false }
            })
            .collect();
        let world = World {
            regions: regions.to_vec(),
            pages,
            random,
            activity,
            cancel: cancel.clone(),
            next_value,
            armed: false,
            paused: false,
            flushed: false,
            throttle_percent: 0,
            hints: None,
            queue: VecDeque::new(),
            late: Vec::new(),
            unlogged: Vec::new(),
        };
        Self(Arc::new(Mutex::new(world)))
    }

    /// Locks the world.
    pub fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl World {
    /// Runs some steps.
    pub fn live(&mut self) {
        let steps = self.random.below(self.activity.burst + 1);
        for _ in 0..steps {
            if self.paused || self.activity.steps == 0 {
                break;
            }
            self.activity.steps -= 1;
            match &mut self.activity.cancel_after {
                Some(0) => self.cancel.cancel(),
                Some(left) => *left -= 1,
                None => {}
            }
            self.step();
        }
        if self.activity.steps == 0 {
            self.finish_steps();
        }
    }

    /// Finishes the steps in progress.
    fn finish_steps(&mut self) {
        while self.handle_hint() {}
        if let Some(hints) = &self.hints {
            hints.ended();
        }
        self.log_all();
    }

    fn step(&mut self) {
        match self.random.below(12) {
            0..3 => self.write(Use::Used),
            3 => self.change(Use::Used, Use::Free),
            // Used again: written at once, since until then its content does not matter.
            4 => self.write(Use::Free),
            5 => self.write(Use::Hinted),
            6 | 7 => self.hint_free_pages(),
            8 => {
                self.handle_hint();
                if let Some((hints, range)) = self.late.pop() {
                    hints.hint(&[range]);
                }
            }
            9 => self.inflate(),
            10 => self.deflate_or_log(),
            _ => self.device_write(),
        }
    }

    /// Returns a page with this owner, if one is found.
    fn find(&mut self, usage: Use) -> Option<usize> {
        let start = self.random.below(self.pages.len() as u64) as usize;
        let places = (start..self.pages.len()).chain(0..start);
        places.take(64).find(|&index| self.pages[index].usage == usage)
    }

    fn value(&mut self) -> u64 {
        self.next_value += 1;
        if self.random.below(4) == 0 { 0 } else { self.next_value }
    }

    fn change(&mut self, from: Use, to: Use) {
        if let Some(index) = self.find(from) {
            self.pages[index].usage = to;
        }
    }

    /// A vCPU writes to a page and owns it from then on.
    fn write(&mut self, usage: Use) {
        let Some(index) = self.find(usage) else { return };
        let value = self.value();
        let page = &mut self.pages[index];
        *page = Page {
            usage: Use::Used,
            value,
            held: true,
            marked: page.marked || self.armed,
            ..*page
        };
    }

    /// The driver allocates free pages and hints them.
    fn hint_free_pages(&mut self) {
        if self.hints.is_none() {
            return;
        }
        let Some(first) = self.find(Use::Free) else { return };
        let run =
            self.pages[first..].iter().take(20).take_while(|page| page.usage == Use::Free).count();
        for index in first..first + run {
            self.pages[index].usage = Use::Hinted;
            self.queue.push_back(PageRange::new(self.pfn(index), 1));
        }
    }

    /// The device passes on a hint.
    fn handle_hint(&mut self) -> bool {
        let Some(range) = self.queue.pop_front() else { return false };
        if let Some(hints) = &self.hints {
            hints.hint(&[range]);
            if self.random.below(40) == 0 {
                hints.ended();
            }
        }
        true
    }

    /// Inflates the balloon by a page and discards it, which is logged later.
    fn inflate(&mut self) {
        let Some(index) = self.find(Use::Free) else { return };
        let page = &mut self.pages[index];
        *page = Page { usage: Use::Ballooned, value: 0, held: false, ..*page };
        self.unlogged.push(index);
    }

    fn deflate_or_log(&mut self) {
        if self.unlogged.is_empty() || self.random.below(2) == 0 {
            self.change(Use::Ballooned, Use::Used);
        } else {
            let which = self.random.below(self.unlogged.len() as u64) as usize;
            let index = self.unlogged.swap_remove(which);
            self.pages[index].logged = self.armed;
        }
    }

    /// The monitor writes for a device and logs that later.
    fn device_write(&mut self) {
        let Some(index) = self.find(Use::Used) else { return };
        let value = self.value();
        let page = &mut self.pages[index];
        *page = Page { value, held: true, ..*page };
        self.unlogged.push(index);
    }

    fn log_all(&mut self) {
        for index in std::mem::take(&mut self.unlogged) {
            self.pages[index].logged = self.armed;
        }
    }

    fn pfn(&self, mut index: usize) -> Pfn {
        for region in &self.regions {
            if (index as u64) < region.pages {
                return Pfn(region.start.0 + index as u64);
            }
            index -= region.pages as usize;
        }
        Pfn(u64::MAX)
    }

    fn indices(&self, range: PageRange) -> std::ops::Range<usize> {
        let mut before = 0;
        for region in &self.regions {
            if region.intersection(range) == range {
                let first = (before + range.start.0 - region.start.0) as usize;
                return first..first + range.pages as usize;
            }
            before += region.pages;
        }
        panic!("{range} is not in one region of {:?}", self.regions);
    }

    /// Whether the guest is paused.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether writes are logged.
    pub fn is_armed(&self) -> bool {
        self.armed
    }

    /// Number of populated pages at the source.
    pub fn held_pages(&self) -> u64 {
        self.pages.iter().filter(|page| page.held).count() as u64
    }

    /// Checks that no effect of a migration is left.
    ///
    /// # Panics
    /// If one is.
    pub fn check_unharmed(&self) {
        assert!(
            !self.paused && !self.armed && self.hints.is_none(),
            "{:?}",
            (self.paused, self.armed)
        );
        assert_eq!(self.throttle_percent, 0);
        assert!(self.pages.iter().all(|page| page.usage != Use::Hinted));
    }

    /// Checks that `content` has every page that is not free; returns the number of free pages.
    ///
    /// # Panics
    /// If a page differs.
    pub fn check_moved(&self, content: &dyn Fn(Pfn, &mut [u8])) -> u64 {
        let (mut here, mut there) =
            (vec![0; PAGE_SIZE_BYTES as usize], vec![0; PAGE_SIZE_BYTES as usize]);
        let mut free = 0;
        for (index, page) in self.pages.iter().enumerate() {
            assert_ne!(page.usage, Use::Hinted, "the driver still holds pages");
            if page.usage == Use::Free {
                free += 1;
                continue;
            }
            page_bytes(page.value, &mut here);
            content(self.pfn(index), &mut there);
            assert!(here == there, "{} ({page:?}) differs", self.pfn(index));
        }
        free
    }
}

/// The guest's memory.
#[derive(Debug)]
pub struct SimMemory(pub Hooks);

impl SourceMemory for SimMemory {
    fn regions(&self) -> Vec<PageRange> {
        self.0.world().regions.clone()
    }

    fn held(&self, range: PageRange, held: &mut Vec<PageRange>) -> Result<(), BoxError> {
        let mut world = self.0.world();
        world.live();
        for (offset, index) in world.indices(range).enumerate() {
            let page = PageRange::new(Pfn(range.start.0 + offset as u64), 1);
            if !world.pages[index].held {
                continue;
            }
            match held.last_mut() {
                Some(last) if last.end() == page.start => last.pages += 1,
                _ => held.push(page),
            }
        }
        world.live();
        Ok(())
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> Result<(), BoxError> {
        let mut world = self.0.world();
        let places = world.indices(range);
        for (index, page) in places.zip(bytes.chunks_exact_mut(PAGE_SIZE_BYTES as usize)) {
            page_bytes(world.pages[index].value, page);
            world.live();
        }
        Ok(())
    }
}

/// Both dirty logs.
#[derive(Debug)]
pub struct SimDirty(pub Hooks);

impl DirtySource for SimDirty {
    fn arm(&mut self) -> Result<(), BoxError> {
        let mut world = self.0.world();
        world.live();
        // A change that the monitor has begun is logged when it is done.
        world.armed = true;
        world.live();
        Ok(())
    }

    fn sync(&mut self, found: &mut PageBitmap) -> Result<(), BoxError> {
        let mut world = self.0.world();
        world.live();
        for index in 0..world.pages.len() {
            let page = PageRange::new(world.pfn(index), 1);
            if world.pages[index].marked || std::mem::take(&mut world.pages[index].logged) {
                found.insert(page);
            }
        }
        world.live();
        Ok(())
    }

    fn clear(&mut self, range: PageRange) -> Result<(), BoxError> {
        let mut world = self.0.world();
        let places = world.indices(range);
        for page in &mut world.pages[places] {
            page.marked = false;
        }
        world.live();
        Ok(())
    }

    fn disarm(&mut self) -> Result<(), BoxError> {
        let mut world = self.0.world();
        world.armed = false;
        for page in &mut world.pages {
            (page.marked, page.logged) = (false, false);
        }
        Ok(())
    }
}

/// Pauses and throttles the guest.
#[derive(Debug)]
pub struct SimGuest(pub Hooks);

impl Guest for SimGuest {
    fn flush(&mut self) -> Result<(), BoxError> {
        let mut world = self.0.world();
        world.live();
        world.flushed = true;
        Ok(())
    }

    fn pause_and_save(&mut self) -> Result<(), BoxError> {
        let mut world = self.0.world();
        assert!(world.flushed, "the guest is paused with data that is not written back");
        world.live();
        assert!(world.hints.is_none(), "the driver has not been notified of the end of hints");
        world.log_all();
        world.paused = true;
        Ok(())
    }

    fn resume(&mut self) -> Result<(), BoxError> {
        self.0.world().paused = false;
        Ok(())
    }

    fn throttle(&mut self, percent: u8) -> Result<(), BoxError> {
        let mut world = self.0.world();
        world.throttle_percent = percent;
        Ok(())
    }
}

/// The guest's driver for hints, and its device.
#[derive(Debug)]
pub struct SimHints(pub Hooks);

impl FreePageSource for SimHints {
    fn start(&mut self, hints: HintReceiver) -> Result<(), BoxError> {
        let mut world = self.0.world();
        world.hints = Some(hints);
        world.live();
        Ok(())
    }

    fn stop(&mut self) {
        // The driver notices at some later time; its hints until then are late.
        self.0.world().live();
    }

    fn finish(&mut self) {
        let mut world = self.0.world();
        world.live();
        let (hints, queue) = (world.hints.take(), std::mem::take(&mut world.queue));
        world.late.extend(hints.into_iter().flat_map(|hints| {
            queue.iter().map(move |range| (hints.clone(), *range)).collect::<Vec<_>>()
        }));
        for page in &mut world.pages {
            if page.usage == Use::Hinted {
                page.usage = Use::Free;
            }
        }
    }
}
