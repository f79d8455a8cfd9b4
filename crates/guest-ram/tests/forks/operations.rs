//! What a case consists of.

use std::ops::Range;

use proptest::prelude::*;
use serde::{Deserialize, Serialize};

pub const PAGE: u64 = 4096;

/// Most writes of one operation or of the start; each has its own mark.
pub const MOST_WRITES: u32 = 16;

/// A first machine, and what happens to it and to its relatives.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Case {
    pub setup: Setup,
    pub operations: Vec<Operation>,
}

/// The first machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Setup {
    /// Sizes of the two regions in pages.
    pub pages: [u64; 2],
    /// First page of the first region. The second one begins at the same distance from 4 GiB.
    pub first_page: u64,
    pub page_size: PageSize,
    pub origin: Origin,
    /// Written before anything else.
    pub content: Vec<Run>,
    pub others: OtherThreads,
    pub flaw: Flaw,
}

impl Setup {
    pub fn size_pages(&self) -> u64 {
        self.pages.iter().sum()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PageSize {
    Small,
    Huge,
}

/// Where the content of the start comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    New,
    /// An image that is mapped.
    Restored,
}

/// Whether a machine has a thread that uses all locks of its memory all the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OtherThreads {
    None,
    One,
}

/// A deliberate mistake, which the model must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Flaw {
    None,
    /// Memory of a file, which relatives share.
    SharedFile,
    /// A machine goes on with its parent's files of /proc.
    FilesOfParent,
    /// Discards bring the content of the image back.
    DiscardToImage,
    /// Forks while another thread uses the memory.
    NotStill,
}

/// Pages, by their number in memory without gaps. Limits are applied when the size is known.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Run {
    first: u64,
    pages: u64,
}

impl Run {
    /// The run in memory of `size_pages`; at least one page.
    pub fn within(self, size_pages: u64) -> Range<u64> {
        let first = self.first % size_pages;
        first..first + self.pages.clamp(1, size_pages - first)
    }
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Write {
    pub way: Way,
    run: Run,
    /// Bytes that are left out at the begin and at the end.
    skip: [u64; 2],
    pub content: Content,
}

impl Write {
    /// The bytes in memory of `size_pages`.
    pub fn bytes(&self, size_pages: u64) -> Range<u64> {
        let pages = self.run.within(size_pages);
        let unit = match self.way {
            Way::Words => 8,
            Way::Slice | Way::Kernel => 1,
            Way::Pages => PAGE,
        };
        let [first, last] = self.skip.map(|bytes| bytes / unit * unit);
        pages.start * PAGE + first..pages.end * PAGE - last
    }
}

/// How something is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Way {
    /// Word by word, as a guest does.
    Words,
    /// As a device does.
    Slice,
    /// By `GuestRam::write_pages`.
    Pages,
    /// By a system call that reads a file, as disks do.
    Kernel,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// Words that occur nowhere else.
    Mark,
    Zeros,
}

/// How pages are discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tenure {
    /// As page reporting does.
    Momentary,
    /// As a balloon does.
    Ballooned,
}

/// What changes no content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Advice {
    /// Split huge pages of which parts were discarded.
    SplitHuge,
    /// Make huge pages of small ones.
    Collapse,
    /// Allocate everything.
    Populate,
}

/// How memory is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Look {
    All,
    /// Only what is populated; the rest must be zeros.
    Populated,
}

/// How memory is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveKind {
    /// It stands still.
    Plain,
    /// It is written to meanwhile.
    Background,
}

/// Which process, of those that can do it: the number modulo their number.
pub type Pick = usize;

/// Something that happens. Only operations that read something are waited for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Operation {
    Write(Pick, Write),
    Discard(Pick, Vec<Run>, Tenure),
    Reclaim(Pick, Run),
    DiscardZeros(Pick, Run),
    Advise(Pick, Advice),
    /// With writes that follow the moment of the image.
    Save(Pick, SaveKind, Vec<Write>),
    /// A machine makes a checkpoint.
    Checkpoint(Pick),
    /// A checkpoint makes a machine.
    Machine(Pick),
    Check(Pick, Look),
    /// kill -9, whatever it is doing.
    Kill(Pick),
    /// kill -9 some microseconds after it was told to fork.
    KillInFork(Pick, u64),
}

fn run() -> impl Strategy<Value = Run> {
    // Many begin at the same few pages; some have hundreds.
    let first = prop_oneof![0..24_u64, 0..2048_u64];
    let pages = prop_oneof![3 => 1..8_u64, 2 => 1..64_u64, 1 => 64..700_u64];
    (first, pages).prop_map(|(first, pages)| Run { first, pages })
}

fn write() -> impl Strategy<Value = Write> {
    let way = prop_oneof![
        4 => Just(Way::Words), 3 => Just(Way::Slice), 2 => Just(Way::Pages), 1 => Just(Way::Kernel)
    ];
    let skip = prop_oneof![Just(0), 0..2048_u64];
    let content = prop_oneof![4 => Just(Content::Mark), 1 => Just(Content::Zeros)];
    (way, run(), [skip.clone(), skip], content).prop_map(|(way, run, skip, content)| Write {
        way,
        run,
        skip,
        content,
    })
}

fn operation() -> impl Strategy<Value = Operation> {
    let pick = 0..64_usize;
    let tenure = prop_oneof![Just(Tenure::Momentary), Just(Tenure::Ballooned)];
    let advice = prop_oneof![
        4 => Just(Advice::SplitHuge),
        4 => Just(Advice::Collapse),
        1 => Just(Advice::Populate),
    ];
    let look = prop_oneof![Just(Look::All), Just(Look::Populated)];
    let kind = prop_oneof![1 => Just(SaveKind::Plain), 2 => Just(SaveKind::Background)];
    let runs = prop::collection::vec(run(), 1..6);
    let writes = prop::collection::vec(write(), 0..5);
    prop_oneof![
        24 => (pick.clone(), write()).prop_map(|(pick, write)| Operation::Write(pick, write)),
        12 => (pick.clone(), runs, tenure)
            .prop_map(|(pick, runs, tenure)| Operation::Discard(pick, runs, tenure)),
        2 => (pick.clone(), run()).prop_map(|(pick, run)| Operation::Reclaim(pick, run)),
        4 => (pick.clone(), run()).prop_map(|(pick, run)| Operation::DiscardZeros(pick, run)),
        4 => (pick.clone(), advice).prop_map(|(pick, advice)| Operation::Advise(pick, advice)),
        4 => (pick.clone(), kind, writes)
            .prop_map(|(pick, kind, writes)| Operation::Save(pick, kind, writes)),
        6 => pick.clone().prop_map(Operation::Checkpoint),
        7 => pick.clone().prop_map(Operation::Machine),
        5 => (pick.clone(), look).prop_map(|(pick, look)| Operation::Check(pick, look)),
        2 => pick.clone().prop_map(Operation::Kill),
        2 => (pick, 0..600_u64).prop_map(|(pick, delay)| Operation::KillInFork(pick, delay)),
    ]
}

fn setup(flaw: Flaw) -> impl Strategy<Value = Setup> {
    let small = ([40..300_u64, 24..200_u64], 0..512_u64, Just(PageSize::Small));
    // Some of these regions begin with a huge page.
    let first_page = prop_oneof![Just(0_u64), 0..512_u64];
    let huge = ([600..1600_u64, 100..448_u64], first_page, Just(PageSize::Huge));
    let origin = match flaw {
        Flaw::DiscardToImage => Just(Origin::Restored).boxed(),
        Flaw::SharedFile => Just(Origin::New).boxed(),
        _ => prop_oneof![3 => Just(Origin::New), 2 => Just(Origin::Restored)].boxed(),
    };
    let others = match flaw {
        Flaw::NotStill => Just(OtherThreads::One).boxed(),
        _ => prop_oneof![3 => Just(OtherThreads::None), 1 => Just(OtherThreads::One)].boxed(),
    };
    let content = prop::collection::vec(run(), 0..MOST_WRITES as usize - 1);
    (prop_oneof![small, huge], origin, content, others).prop_map(
        move |((pages, first_page, page_size), origin, content, others)| Setup {
            pages,
            first_page,
            page_size,
            origin,
            content,
            others,
            flaw,
        },
    )
}

/// With at most so many operations.
pub fn case(flaw: Flaw, operations: usize) -> impl Strategy<Value = Case> {
    let operations = prop::collection::vec(operation(), 1..=operations);
    (setup(flaw), operations).prop_map(|(setup, operations)| Case { setup, operations })
}
