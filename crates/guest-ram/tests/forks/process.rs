//! A process of the tree: a machine, or a checkpoint that holds its memory. It obeys commands until
//! the test is gone.
//!
//! It forks as Ebb does (crates/vmm/src/vm/fork.rs): a machine while its memory is held still, a
//! checkpoint as the only thread of its process. A new process keeps no descriptors but those that
//! the memory needs, and a machine replaces the files of /proc by its own.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use ebb_abi::Pfn;
use ebb_guest_ram::{
    BackgroundUnavailable, Backing, GuestRam, GuestRange, HugePages, Populate, PreparedSave,
    RamImage, RegionSpec,
};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use crate::link::{Answer, Command, Link, Role};
use crate::memory::{Span, hash_of};
use crate::operations::{
    Advice, Flaw, Look, Origin, OtherThreads, PAGE, PageSize, SaveKind, Setup, Tenure, Way,
};

const HUGE_PAGE: u64 = 2 << 20;

/// For the first process.
pub const SETUP: &str = "EBB_FORKS_SETUP";
pub const SOCKET: &str = "EBB_FORKS_SOCKET";

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// The first machine, if this process is to be one. Does not return then.
pub fn run_if_asked() {
    let (Ok(setup), Some(socket)) = (std::env::var(SETUP), std::env::var_os(SOCKET)) else {
        return;
    };
    let setup: Setup = serde_json::from_str(&setup).unwrap();
    limit_life(&setup);
    // A forked process never drops it, nor does the first one.
    let ram: &'static GuestRam = Box::leak(Box::new(build(&setup).unwrap()));
    let socket = PathBuf::from(socket);
    // SAFETY: no handler is installed for this signal. Processes that have ended leave nothing
    // behind.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    let link = Link::connect(&socket).unwrap();
    let mut process =
        Process { setup, ram, socket, link, role: Role::Machine, place: Place::First };
    process.begin().unwrap();
    process.obey_all();
    std::process::exit(0);
}

/// Ends this process when it has got stuck, and the test does not know of it. The socket's end does
/// all else.
fn limit_life(setup: &Setup) {
    let seconds = match setup.flaw {
        Flaw::NotStill => 20,
        _ => 600,
    };
    // SAFETY: the signal, for which there is no handler, ends the process.
    unsafe { libc::alarm(seconds) };
}

fn specs(setup: &Setup) -> [RegionSpec; 2] {
    let region = |start_bytes: u64, pages| RegionSpec {
        start: GuestAddress(start_bytes + setup.first_page * PAGE),
        size_bytes: pages * PAGE,
        host_node: None,
    };
    [region(0, setup.pages[0]), region(4 << 30, setup.pages[1])]
}

/// Memory with the content of the start.
fn build(setup: &Setup) -> Result<GuestRam> {
    let (specs, huge_pages) = (specs(setup), huge_pages(setup));
    let backing = match setup.flaw {
        Flaw::SharedFile => Backing::Memfd,
        _ => Backing::Anonymous,
    };
    let new = GuestRam::new(&specs, backing, huge_pages, Populate::Lazy)?;
    for span in setup.writes() {
        write(&new, &span)?;
    }
    let ram = match setup.origin {
        Origin::New => new,
        Origin::Restored => {
            let file = tempfile::tempfile()?;
            let image = new.save(&file, 0, &mut |_| {})?;
            GuestRam::restore(&specs, huge_pages, file, 0, &image)?
        }
    };
    // Where the kernel refuses it, memory is saved while it stands still.
    let _ = ram.enable_background_saves();
    Ok(ram)
}

fn huge_pages(setup: &Setup) -> HugePages {
    match setup.page_size {
        PageSize::Small => HugePages::Off,
        PageSize::Huge => HugePages::On,
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    First,
    Forked,
}

struct Process {
    setup: Setup,
    ram: &'static GuestRam,
    /// Where new processes connect.
    socket: PathBuf,
    link: Link,
    role: Role,
    place: Place,
}

impl Process {
    fn begin(&self) -> Result<()> {
        if self.role == Role::Machine && self.setup.others == OtherThreads::One {
            let ram = self.ram;
            thread::Builder::new().spawn(move || use_locks(ram))?;
        }
        Ok(self.link.send(&Answer::Born)?)
    }

    fn obey_all(&mut self) {
        loop {
            // An error, too, means that the test is gone.
            let Ok(Some(command)) = self.link.receive() else { return };
            let asked = format!("{command:?}");
            let answer = match self.obey(command) {
                Ok(Some(answer)) => answer,
                // Another process.
                Ok(None) => continue,
                Err(error) => Answer::Failed(format!("{asked:.200}: {error}")),
            };
            if self.link.send(&answer).is_err() {
                return;
            }
        }
    }

    /// Obeys a command; a process that was forked meanwhile has no answer.
    fn obey(&mut self, command: Command) -> Result<Option<Answer>> {
        match command {
            Command::Write(span) => write(self.ram, &span)?,
            Command::Discard { pages, tenure } => self.discard(&pages, tenure)?,
            Command::Reclaim { pages } => self.ram.reclaim(&ranges(self.ram, &pages)),
            Command::DiscardZeros { pages } => {
                for range in ranges(self.ram, &pages) {
                    self.ram.discard_zeros(range)?;
                }
            }
            Command::Advise(Advice::SplitHuge) => self.ram.free_rest_of_huge_pages(),
            Command::Advise(Advice::Collapse) => collapse(self.ram),
            Command::Advise(Advice::Populate) => self.ram.populate(&|| false)?,
            Command::Save { path, kind, writes } => {
                let (image, kind) = self.save(&path, kind, &writes)?;
                return Ok(Some(Answer::Saved { image, kind }));
            }
            Command::Fork => return self.fork(),
            Command::Hash(look) => return Ok(Some(Answer::Hashes(self.hashes(look)?))),
            Command::Read { page } => {
                let mut content = vec![0; PAGE as usize];
                self.ram.read_pages(ranges(self.ram, &(page..page + 1))[0], &mut content)?;
                return Ok(Some(Answer::Page(content)));
            }
        }
        Ok(Some(Answer::Done))
    }

    fn discard(&self, pages: &[Range<u64>], tenure: Tenure) -> Result<()> {
        let ranges: Vec<_> = pages.iter().flat_map(|pages| ranges(self.ram, pages)).collect();
        if self.setup.flaw == Flaw::DiscardToImage {
            for range in ranges {
                let address = self.ram.memory().get_host_address(address_of(range.start))?;
                // SAFETY: not upheld: this is the control, whose memory belongs to a test.
                unsafe {
                    libc::madvise(address.cast(), range.size_bytes() as usize, libc::MADV_DONTNEED);
                }
            }
            return Ok(());
        }
        let outcome = match tenure {
            Tenure::Momentary => self.ram.discard(&ranges),
            Tenure::Ballooned => self.ram.discard_ballooned(&ranges),
        }?;
        let bytes: u64 = ranges.iter().map(|range| range.size_bytes()).sum();
        // Restored memory takes more, and where the kernel needs a descriptor for a process, a
        // forked one does.
        let is_one_call = self.setup.origin == Origin::New
            && self.setup.flaw != Flaw::SharedFile
            && ranges.len() > 1
            && can_name_itself();
        let is_as_expected = !is_one_call || outcome.syscalls == 1;
        if !outcome.is_complete() || outcome.bytes != bytes || !is_as_expected {
            return Err(format!("{outcome:?} of {bytes} bytes").into());
        }
        Ok(())
    }

    fn save(
        &self,
        path: &PathBuf,
        kind: SaveKind,
        writes: &[Span],
    ) -> Result<(RamImage, SaveKind)> {
        let file = File::options().read(true).write(true).create_new(true).open(path)?;
        let prepared = match kind {
            SaveKind::Background => self.prepare()?,
            SaveKind::Plain => None,
        };
        let saved = match prepared {
            None => (self.ram.save(&file, 0, &mut |_| {})?, SaveKind::Plain),
            Some(prepared) => {
                let save = prepared.protect()?;
                return thread::scope(|scope| {
                    let guest = scope.spawn(|| {
                        writes.iter().try_for_each(|span| {
                            write(self.ram, span).map_err(|error| error.to_string())
                        })
                    });
                    let image = save.write(&file, 0, &mut |_| {}, &|| false)?;
                    guest.join().map_err(|_| "the guest has panicked")??;
                    Ok((image, SaveKind::Background))
                });
            }
        };
        writes.iter().try_for_each(|span| write(self.ram, span))?;
        Ok(saved)
    }

    /// Prepares a save of memory in use, where that is possible. A userfaultfd belongs to the process
    /// that has opened it: one that was forked is told so.
    fn prepare(&self) -> Result<Option<PreparedSave<'_>>> {
        match (self.ram.prepare_background_save(), self.place) {
            (Ok(prepared), Place::First) => Ok(Some(prepared)),
            (Err(BackgroundUnavailable::NotEnabled | BackgroundUnavailable::Overlay), _)
            | (Err(BackgroundUnavailable::Forked), Place::Forked) => Ok(None),
            (Ok(_), Place::Forked) => Err("a forked process has its parent's userfaultfd".into()),
            (Err(error), _) => Err(error.into()),
        }
    }

    fn hashes(&self, look: Look) -> Result<Vec<u64>> {
        // Of the process, and by way of locks that were held in a fork.
        self.ram.residency()?;
        let mut content = vec![0; PAGE as usize];
        let zeros = hash_of(&content);
        let mut hashes = Vec::new();
        for region in self.ram.page_ranges() {
            let mut populated = Vec::new();
            match look {
                Look::All => populated.push(region),
                Look::Populated => self.ram.populated_ranges(region, &mut populated)?,
            }
            let first = hashes.len();
            hashes.resize(first + region.pages as usize, zeros);
            for page in populated.iter().flat_map(|range| range.start.0..range.end().0) {
                self.ram.read_pages(GuestRange::new(Pfn(page), 1), &mut content)?;
                hashes[first + (page - region.start.0) as usize] = hash_of(&content);
            }
        }
        Ok(hashes)
    }

    /// Forks. The new process goes on here with another link.
    fn fork(&mut self) -> Result<Option<Answer>> {
        match (self.ram.why_not_forkable(), self.setup.flaw) {
            (None, flaw) if flaw != Flaw::SharedFile => {}
            (Some(_), Flaw::SharedFile) => {}
            (reason, flaw) => return Err(format!("{flaw:?}, and {reason:?}").into()),
        }
        let still = match self.role {
            Role::Machine if self.setup.flaw != Flaw::NotStill => Some(self.ram.hold_still()),
            _ => None,
        };
        // SAFETY: the only locks that other threads use, and the new process, are those of the
        // memory, which are held here, and the allocator's, which the C library takes.
        match unsafe { libc::fork() } {
            -1 => return Err(io::Error::last_os_error().into()),
            0 => {}
            _ => return Ok(Some(Answer::Done)),
        }
        drop(still);
        if let Err(error) = self.become_new() {
            eprintln!("a forked process: {error}");
            // SAFETY: ends the process without running any more of its code.
            unsafe { libc::_exit(1) };
        }
        Ok(None)
    }

    fn become_new(&mut self) -> Result<()> {
        self.place = Place::Forked;
        self.role = self.role.of_forked();
        limit_life(&self.setup);
        // Before the old one is closed: the test learns that the old process has ended when all
        // its descriptors are closed, and must know of this one then.
        self.link = Link::connect(&self.socket)?;
        let own = self.ram.process_files();
        let kept = own.iter().map(|(_, file)| *file).chain(self.ram.restored_file());
        // The file of shared memory is not among them, since it is not forked otherwise.
        if self.setup.flaw != Flaw::SharedFile {
            close_others(kept.chain([self.link.descriptor()]).collect());
        }
        if self.role == Role::Machine && self.setup.flaw != Flaw::FilesOfParent {
            for (name, number) in own {
                let file = File::open(format!("/proc/self/{name}"))?;
                // SAFETY: the number goes on to belong to the memory, and means a file of the same
                // kind from now on.
                if unsafe { libc::dup3(file.as_raw_fd(), number, libc::O_CLOEXEC) } == -1 {
                    return Err(io::Error::last_os_error().into());
                }
            }
        }
        self.begin()
    }
}

/// Whether process_madvise(2) takes the calling thread for a process (`PIDFD_SELF_THREAD`).
fn can_name_itself() -> bool {
    // SAFETY: advises on no memory.
    let advised = unsafe {
        let none: *const libc::iovec = std::ptr::null();
        libc::syscall(libc::SYS_process_madvise, -10000, none, 0, libc::MADV_DONTNEED, 0)
    };
    advised == 0
}

/// Closes all descriptors from 3 on but these.
fn close_others(mut keep: Vec<RawFd>) {
    keep.sort_unstable();
    let mut first = 3;
    for next in keep.into_iter().chain([RawFd::MAX]) {
        if next > first {
            // SAFETY: closes descriptors whose owners are never used or dropped in this process.
            unsafe { libc::syscall(libc::SYS_close_range, first, next - 1, 0) };
        }
        first = first.max(next.saturating_add(1));
    }
}

/// What monitors do next to the thread that forks: each lock is held for most of the time.
fn use_locks(ram: &GuestRam) -> ! {
    loop {
        let _ = ram.residency();
        let _ = ram.discard(&[]);
        thread::sleep(Duration::from_micros(50));
    }
}

/// Pages as the guest numbers them, in one or two regions.
fn ranges(ram: &GuestRam, pages: &Range<u64>) -> Vec<GuestRange> {
    let mut before = 0;
    let mut found = Vec::new();
    for region in ram.page_ranges() {
        let start = pages.start.max(before);
        let end = pages.end.min(before + region.pages);
        if start < end {
            found.push(GuestRange::new(Pfn(region.start.0 + start - before), end - start));
        }
        before += region.pages;
    }
    found
}

fn address_of(page: Pfn) -> GuestAddress {
    GuestAddress(page.address())
}

fn write(ram: &GuestRam, span: &Span) -> Result<()> {
    let content = span.content();
    let pages = span.bytes.start / PAGE..span.bytes.end.div_ceil(PAGE);
    let mut rest = &content[..];
    let mut skipped_bytes = span.bytes.start % PAGE;
    for range in ranges(ram, &pages) {
        let address = GuestAddress(range.start.address() + skipped_bytes);
        let room = (range.size_bytes() - skipped_bytes) as usize;
        let (part, behind) = rest.split_at(room.min(rest.len()));
        (rest, skipped_bytes) = (behind, 0);
        match span.way {
            Way::Words => {
                for (index, word) in part.chunks_exact(8).enumerate() {
                    let value = u64::from_ne_bytes(word.try_into()?);
                    let address = GuestAddress(address.0 + index as u64 * 8);
                    ram.memory().store(value, address, Ordering::Relaxed)?;
                }
            }
            Way::Slice => ram.memory().write_slice(part, address)?,
            Way::Pages => ram.write_pages(range, part)?,
            Way::Kernel => {
                let mut file = tempfile::tempfile()?;
                io::Write::write_all(&mut file, part)?;
                io::Seek::rewind(&mut file)?;
                ram.memory().read_exact_volatile_from(address, &mut file, part.len())?;
            }
        }
    }
    Ok(())
}

/// Has the kernel make huge pages, as its own thread does at other moments.
fn collapse(ram: &GuestRam) {
    for region in ram.regions() {
        let end = region.host_address + region.size_bytes;
        let first = region.host_address.next_multiple_of(HUGE_PAGE);
        for block in (first..end / HUGE_PAGE * HUGE_PAGE).step_by(HUGE_PAGE as usize) {
            // SAFETY: the block lies in memory's mapping; the advice changes no content. The kernel
            // may have reasons to refuse.
            unsafe { libc::madvise(block as *mut _, HUGE_PAGE as usize, libc::MADV_COLLAPSE) };
        }
    }
}
