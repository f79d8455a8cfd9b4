//! A guest of one CPU and one zone, its programs, its host, and a tracker in between.

use std::collections::VecDeque;

use crate::bitmap::Bitmap;
use crate::buddy::{Allocator, FlagOnRemoval};
use crate::percpu::Percpu;
use crate::reporting::Reporting;
use crate::tracker::{Answer, Batch, Flaw, Kind, Losses, Path, Tracker};
use crate::units::{Block, Order, Pfn};

/// What a machine is made of.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The tracker.
    pub kind: Kind,
    /// What is wrong with it.
    pub flaw: Flaw,
    /// Size of memory. Need not be a multiple of anything.
    pub pages: u32,
    /// Free pages that isolation leaves alone.
    pub watermark_pages: u32,
    /// Most blocks named in a report.
    pub batch_blocks: usize,
    /// `percpu`: entries of the array.
    pub entries: usize,
    /// `percpu`: entries that a scan may leave without the array being full.
    pub full_above: usize,
    /// `bitmap`: bits that start a walk.
    pub threshold: usize,
    /// `reporting`: batches of a pass.
    pub budget: usize,
}

/// Something that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A program allocates a block and writes to each page.
    Allocate {
        /// Its size.
        order: Order,
        /// Whether it comes from the upper or the lower end of memory.
        from_top: bool,
    },
    /// A program reads what it has written to a block, and frees it.
    Free {
        /// Which one, modulo their number.
        index: usize,
    },
    /// As `Free`, but the per-CPU list is locked and the block goes directly to the free lists.
    FreePastList {
        /// Which one, modulo their number.
        index: usize,
    },
    /// The oldest blocks of the per-CPU list go to the free lists.
    Drain {
        /// How many.
        blocks: usize,
    },
    /// The free of a block that does not use the per-CPU list, begun by `Free`, is completed.
    Land,
    /// The tracker goes on: a timer fires, blocks are taken and reported, or the host answers.
    Advance {
        /// The host's answer, if it is time for one.
        answer: Answer,
    },
    /// The host discards a block that it was told of, before it answers.
    HostDiscards {
        /// Which one, modulo their number.
        index: usize,
    },
    /// The tracker is stopped.
    Stop,
    /// The tracker is started again.
    Start,
}

/// What may not happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The host knows a page as free that a program uses.
    ReportedInUse(Pfn),
    /// A program does not find in a page what it wrote there.
    ContentLost(Pfn),
    /// Pages are neither in use nor free after a tracker was stopped.
    PagesMissing {
        /// Pages that there should be.
        expected: u32,
        /// Pages that there are.
        found: u32,
    },
    /// The free lists are broken.
    FreeLists(String),
    /// The tracker does not know of all that it lost.
    LossesUncounted(Losses),
    /// A block has long been free and the host still has its memory.
    NeverReported(Block),
}

/// More steps than the passes over a model's few large blocks have.
const ENOUGH_STEPS: u32 = 300;

/// What a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// Whatever was there at boot.
    Boot,
    /// What the owner with this number wrote.
    Written(u32),
    /// Nothing: the host has taken the memory.
    Discarded,
}

/// Where the tracker is in a pass.
#[derive(Clone, Debug)]
enum Phase {
    Idle,
    /// In a pass, with nothing in its hands.
    Walking,
    /// The host was told, and has not answered.
    Told(Batch),
}

/// The guest and its host.
pub struct Machine {
    setup: Setup,
    allocator: Allocator,
    contents: Vec<Content>,
    owners: Vec<Option<u32>>,
    in_use: Vec<Block>,
    cpu_list: VecDeque<Block>,
    landing: VecDeque<Block>,
    next_owner: u32,
    tracker: Option<Box<dyn Tracker>>,
    phase: Phase,
}

impl Machine {
    /// A machine that has just booted, with its tracker running.
    pub fn new(setup: Setup) -> Self {
        let flags = match setup.flaw {
            Flaw::FlagOutlivesAllocation => FlagOnRemoval::Kept,
            _ => FlagOnRemoval::Cleared,
        };
        let mut machine = Self {
            setup,
            allocator: Allocator::new(setup.pages, setup.watermark_pages, flags),
            contents: vec![Content::Boot; setup.pages as usize],
            owners: vec![None; setup.pages as usize],
            in_use: Vec::new(),
            cpu_list: VecDeque::new(),
            landing: VecDeque::new(),
            next_owner: 0,
            tracker: None,
            phase: Phase::Idle,
        };
        machine.start();
        machine
    }

    /// Does a step, and checks what has to hold after each one.
    pub fn step(&mut self, step: Step) -> Result<(), Violation> {
        match step {
            Step::Allocate { order, from_top } => self.allocate(order, from_top),
            Step::Free { index } => self.free(index, Path::CpuList)?,
            Step::FreePastList { index } => self.free(index, Path::Direct)?,
            Step::Drain { blocks } => self.drain(blocks),
            Step::Land => self.land(),
            Step::Advance { answer } => self.advance(answer)?,
            Step::HostDiscards { index } => self.host_discards(index)?,
            Step::Stop => self.stop()?,
            Step::Start => self.start(),
        }
        self.check_told()?;
        self.check_losses()
    }

    /// Stops the tracker, and checks that all memory is where it belongs and holds what was
    /// written.
    pub fn finish(&mut self) -> Result<(), Violation> {
        self.stop()?;
        while !self.in_use.is_empty() {
            self.free(0, Path::CpuList)?;
        }
        self.drain(usize::MAX);
        self.land();
        self.allocator.validate().map_err(Violation::FreeLists)?;
        self.check_pages()
    }

    /// Lets the tracker go on until it has nothing more to do, with nothing else happening.
    pub fn settle(&mut self) -> Result<(), Violation> {
        self.drain(usize::MAX);
        self.land();
        for _ in 0..ENOUGH_STEPS {
            self.step(Step::Advance { answer: Answer::Discarded })?;
        }
        Ok(())
    }

    /// Checks that the host has the memory of all large free blocks. `since_start`: of those used
    /// since the tracker started.
    pub fn check_reported(&self, pages: Expected) -> Result<(), Violation> {
        let missed = self.allocator.blocks(Order::BLOCK).find(|block| {
            block.pages().any(|page| match self.contents[page.0 as usize] {
                Content::Boot => pages == Expected::All,
                Content::Written(_) => true,
                Content::Discarded => false,
            })
        });
        missed.map_or(Ok(()), |block| Err(Violation::NeverReported(block)))
    }

    /// What the tracker knows to be lost.
    pub fn losses(&self) -> Losses {
        self.tracker.as_ref().map_or_else(Losses::default, |tracker| tracker.losses())
    }

    fn start(&mut self) {
        let Setup { flaw, pages, batch_blocks, .. } = self.setup;
        if self.tracker.is_some() {
            return;
        }
        self.tracker = Some(match self.setup.kind {
            Kind::Percpu => {
                Box::new(Percpu::new(self.setup.entries, self.setup.full_above, batch_blocks, flaw))
            }
            Kind::Bitmap => Box::new(Bitmap::new(
                pages,
                self.setup.threshold,
                batch_blocks,
                flaw,
                &self.allocator,
            )),
            Kind::Reporting => Box::new(Reporting::new(batch_blocks, self.setup.budget, flaw)),
        });
    }

    /// Hooks go first; what is under way comes to its end, the device having been reset.
    fn stop(&mut self) -> Result<(), Violation> {
        if self.setup.flaw == Flaw::StopForgets {
            self.phase = Phase::Idle;
        } else if matches!(self.phase, Phase::Told(_)) {
            self.advance(Answer::Failed)?;
        }
        self.phase = Phase::Idle;
        self.tracker = None;
        self.check_pages()
    }

    fn allocate(&mut self, order: Order, from_top: bool) {
        let listed = self.cpu_list.iter().rposition(|block| block.order == order);
        let block = match listed {
            Some(index) => self.cpu_list.remove(index),
            None => self.allocator.allocate(order, from_top),
        };
        let Some(block) = block else { return };
        let owner = self.next_owner;
        self.next_owner += 1;
        for page in block.pages() {
            self.owners[page.0 as usize] = Some(owner);
            self.contents[page.0 as usize] = Content::Written(owner);
        }
        self.in_use.push(block);
    }

    fn free(&mut self, index: usize, path: Path) -> Result<(), Violation> {
        if self.in_use.is_empty() {
            return Ok(());
        }
        let block = self.in_use.swap_remove(index % self.in_use.len());
        for page in block.pages() {
            let owner = self.owners[page.0 as usize].take();
            if owner.map(Content::Written) != Some(self.contents[page.0 as usize]) {
                return Err(Violation::ContentLost(page));
            }
        }
        if let Some(tracker) = &mut self.tracker {
            tracker.freed(block, &self.allocator);
        }
        if !block.order.has_cpu_list() {
            self.landing.push_back(block);
        } else if path == Path::Direct {
            self.join_free_lists(block, Path::Direct);
        } else {
            self.cpu_list.push_back(block);
        }
        Ok(())
    }

    fn drain(&mut self, blocks: usize) {
        for _ in 0..blocks.min(self.cpu_list.len()) {
            if let Some(block) = self.cpu_list.pop_front() {
                self.join_free_lists(block, Path::CpuList);
            }
        }
    }

    fn land(&mut self) {
        while let Some(block) = self.landing.pop_front() {
            self.join_free_lists(block, Path::Direct);
        }
    }

    fn join_free_lists(&mut self, block: Block, path: Path) {
        let into = self.allocator.free(block);
        if let Some(tracker) = &mut self.tracker {
            tracker.merged(block, into, path);
        }
    }

    fn advance(&mut self, answer: Answer) -> Result<(), Violation> {
        let phase = std::mem::replace(&mut self.phase, Phase::Idle);
        let Some(tracker) = &mut self.tracker else { return Ok(()) };
        self.phase = match phase {
            Phase::Idle if tracker.begin(&self.allocator) => {
                // A free is through with its last steps long before the delay of a timer is over.
                self.land();
                Phase::Walking
            }
            Phase::Idle => Phase::Idle,
            Phase::Walking => match tracker.fill(&mut self.allocator) {
                None => Phase::Idle,
                Some(mut batch) => {
                    if self.setup.flaw == Flaw::PutBackEarly {
                        for block in batch.held.drain(..) {
                            tracker.put_back(block, Answer::Failed, &mut self.allocator);
                        }
                    }
                    Phase::Told(batch)
                }
            },
            Phase::Told(batch) => {
                tracker.answered(&batch.named, answer);
                if answer == Answer::Discarded {
                    for &block in &batch.named {
                        self.discard(block)?;
                    }
                }
                if let Some(tracker) = &mut self.tracker {
                    for block in batch.held {
                        tracker.put_back(block, answer, &mut self.allocator);
                    }
                }
                Phase::Walking
            }
        };
        Ok(())
    }

    fn host_discards(&mut self, index: usize) -> Result<(), Violation> {
        match &self.phase {
            Phase::Told(batch) if !batch.named.is_empty() => {
                self.discard(batch.named[index % batch.named.len()])
            }
            _ => Ok(()),
        }
    }

    fn discard(&mut self, block: Block) -> Result<(), Violation> {
        for page in block.pages().filter(|page| page.0 < self.setup.pages) {
            if self.owners[page.0 as usize].is_some() {
                return Err(Violation::ReportedInUse(page));
            }
            self.contents[page.0 as usize] = Content::Discarded;
        }
        Ok(())
    }

    /// Nothing that the host was told of is in use before it answers.
    fn check_told(&self) -> Result<(), Violation> {
        let Phase::Told(batch) = &self.phase else { return Ok(()) };
        let mut pages = batch.named.iter().flat_map(|block| block.pages());
        let used = pages.find(|page| self.owners.get(page.0 as usize).copied().flatten().is_some());
        used.map_or(Ok(()), |page| Err(Violation::ReportedInUse(page)))
    }

    fn check_losses(&self) -> Result<(), Violation> {
        let losses = self.losses();
        let seen = losses.captured + losses.again + losses.lost;
        let counted = self.setup.kind != Kind::Percpu || losses.frees <= seen;
        if counted { Ok(()) } else { Err(Violation::LossesUncounted(losses)) }
    }

    /// All pages are in use, free, or on their way to the free lists.
    fn check_pages(&self) -> Result<(), Violation> {
        let elsewhere = self.in_use.iter().chain(&self.cpu_list).chain(&self.landing);
        let found =
            self.allocator.free_pages() + elsewhere.map(|block| block.order.pages()).sum::<u32>();
        if found == self.setup.pages {
            Ok(())
        } else {
            Err(Violation::PagesMissing { expected: self.setup.pages, found })
        }
    }
}

/// Which free memory the host is expected to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// All of it.
    All,
    /// What was used since the tracker started.
    UsedSinceStart,
}
