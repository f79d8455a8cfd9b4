//! What the core knows of the memory that it merges.

use ebb_abi::{PageRange, Pfn};

use crate::store::Slot;

/// Pages that [`Memory::look`] takes at most at once: those of a huge page.
pub const BLOCK_PAGES: u64 = 512;

/// A NUMA node of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node(pub u32);

impl Node {
    /// No node in particular: where pages of all nodes are merged, stable pages are asked for and
    /// made under this one.
    pub const ANY: Self = Self(u32::MAX);
}

impl std::fmt::Display for Node {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if *self == Self::ANY {
            formatter.write_str("any node")
        } else {
            write!(formatter, "node {}", self.0)
        }
    }
}

/// Hash of a page's content under a [`Secret`]: equal contents have equal hashes, and nothing
/// follows from equal hashes but that a comparison is worth its price. Only the low 48 bits are
/// used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageHash(u64);

impl PageHash {
    /// Number of bits used.
    pub const BITS: u32 = 48;

    /// The low bits of `hash`.
    pub const fn new(hash: u64) -> Self {
        Self(hash & ((1 << Self::BITS) - 1))
    }

    /// The bits.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// What hashes depend on; a guest that does not know it cannot make pages whose hashes collide. All
/// members of a domain that share a store have the same.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret(pub [u8; 32]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Secret(..)")
    }
}

/// What a look at a page found, without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// No content: the host holds nothing for it (it reads as zeros).
    Absent,
    /// The page may have been written to since the last look at it. It is tracked from now on: what
    /// is read after this look is what it contains unless a later look says `Written` again.
    Written,
    /// Not written to since the last look.
    Clean,
    /// A stable page is mapped in its place, and it was not written to since.
    Merged,
    /// A stable page was mapped in its place, but it has been written to since: it has a page of
    /// its own again, and has given up its share of the stable page (told once as `Broken`; later
    /// looks say `Copied` for a while, or `Written` or `Clean`).
    Broken(Slot),
    /// Part of a huge page, not written to since the last look. Splitting costs the guest speed, so
    /// more is asked for.
    HugeClean,
    /// Part of a huge page that may have been written to; tracked from now on.
    HugeWritten,
    /// It was told as `Broken` before, and the owner has not yet made it a page like others, which
    /// it does by itself after a while: it cannot be merged until then.
    Copied,
    /// Cannot be merged here: not anonymous memory, locked, or excluded by the owner.
    Excluded,
}

/// Content of a page that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeros only.
    Zero,
    /// Anything else.
    Hash(PageHash),
}

/// What a page is to be replaced by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Nothing at all: it reads as zeros.
    Zero,
    /// The stable page in this slot.
    Slot(Slot),
}

/// A page that is to be replaced, if its content is the target's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replace {
    /// The page.
    pub page: Pfn,
    /// What takes its place.
    pub target: Target,
}

/// What became of a [`Replace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replaced {
    /// The target is in its place. The page's memory is the host's again.
    Done,
    /// The contents differ: nothing was changed.
    Different,
    /// The page is pinned, or the kernel refuses to move it for now: nothing was changed.
    Busy,
    /// The run is too short for the mappings that are left: nothing was changed.
    NoMappings,
    /// There is nothing to be replaced any more, or it cannot be replaced.
    Gone,
}

/// What became of merged pages that were written to; the numbers only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Returns {
    /// Pages that were made pages like others again.
    pub brought_back_pages: u64,
    /// Of these, pages that were merged again.
    pub remerged_pages: u64,
}

impl std::ops::AddAssign for Returns {
    fn add_assign(&mut self, other: Self) {
        self.brought_back_pages += other.brought_back_pages;
        self.remerged_pages += other.remerged_pages;
    }
}

/// Memory of one owner (a virtual machine).
pub trait Memory {
    /// Why memory could not be looked at or replaced.
    type Error: std::error::Error + Send + Sync + 'static;

    /// The pages that may be looked at, in ascending order, not overlapping.
    fn ranges(&self) -> Vec<PageRange>;

    /// Looks at a block of at most [`BLOCK_PAGES`] pages within one range, and fills `looks` with
    /// one entry for each page.
    fn look(&mut self, block: PageRange, looks: &mut Vec<Look>) -> Result<(), Self::Error>;

    /// Reads pages (ascending) and appends what they contain; `None` for a page that cannot be
    /// read. Reading must not mark pages as used more than needed, and must not allocate pages for
    /// absent ones.
    fn hash(
        &mut self,
        pages: &[Pfn],
        secret: &Secret,
        contents: &mut Vec<Option<Content>>,
    ) -> Result<(), Self::Error>;

    /// Appends each page's node; `None` if it has none (absent, swapped out).
    fn nodes(&mut self, pages: &[Pfn], nodes: &mut Vec<Option<Node>>) -> Result<(), Self::Error>;

    /// Copies a page into `content` (4096 bytes), to become a stable page. It may be written to
    /// meanwhile; only [`replace`](Self::replace) decides.
    fn read(&mut self, page: Pfn, content: &mut [u8]) -> Result<(), Self::Error>;

    /// Replaces pages (ascending): each is frozen, so that no processor and no device can change
    /// it, compared with its target, and only if it is the same, replaced. `replaced` gets an entry
    /// for each. Neighbours with neighbouring slots are replaced in one go. The list may span
    /// several blocks, and several pages may have the same slot.
    ///
    /// After an error, what `replaced` holds is true, and all pages behind it are unchanged: a page
    /// that was replaced is always told as [`Replaced::Done`], or else its slot could be given back
    /// while it is mapped.
    fn replace(
        &mut self,
        pages: &[Replace],
        replaced: &mut Vec<Replaced>,
    ) -> Result<(), Self::Error>;

    /// Gives every merged page of `range` a page of its own again, and appends the slots that have
    /// lost a share, once for each page.
    fn unmerge(&mut self, range: PageRange, released: &mut Vec<Slot>) -> Result<(), Self::Error>;

    /// The memory is about to go away: appends the slots that its merged pages in `range` have
    /// shares of, as [`unmerge`](Self::unmerge) does, but the pages need no content any more.
    fn abandon(&mut self, range: PageRange, released: &mut Vec<Slot>) -> Result<(), Self::Error> {
        self.unmerge(range, released)
    }

    /// What became of pages that were told as [`Look::Broken`], as far as that takes the owner
    /// something.
    fn returns(&self) -> Returns {
        Returns::default()
    }

    /// Slots that lost a share without a look, because the owner discarded pages; appended once for
    /// each page and then forgotten.
    fn take_released(&mut self, released: &mut Vec<Slot>);
}
