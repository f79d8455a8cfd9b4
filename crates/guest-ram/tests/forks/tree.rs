//! The test's side: the tree of processes, and the model of each one's memory.

use std::fmt;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use ebb_guest_ram::RamImage;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{
    PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};

use crate::link::{Answer, Command, Link, Role};
use crate::memory::{Difference, Memory, Span, describe, first_mark};
use crate::operations::{
    Case, Content, Flaw, Look, Operation, PAGE, Pick, Run, SaveKind, Setup, Tenure, Way, Write,
};
use crate::process;

/// Most processes at a time.
const MOST_PROCESSES: usize = 12;

/// What differs from the model.
#[derive(Debug)]
pub enum Violation {
    /// A page has another content than the process has written.
    Content { process: usize, role: Role, found: Difference },
    /// A page looked otherwise when read a second time: as if it had no content, most likely.
    Populated { process: usize, page: u64 },
    /// An image is not the memory of its moment.
    Image { process: usize, kind: SaveKind, found: Difference },
    /// A process has ended by itself.
    Ended { process: usize },
    /// A process has been given time enough, and has not answered.
    Silent { process: usize, waited: Duration },
    /// A process could not do something.
    Failed { process: usize, error: String },
}

impl fmt::Display for Violation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let differs = |found: &Difference| {
            let Difference { page, word, expected, found } = found;
            let (expected, found) = (describe(*expected), describe(*found));
            format!("page {page} has {found} in word {word} instead of {expected}")
        };
        match self {
            Self::Content { process, role, found } => {
                write!(formatter, "process {process}, {role:?}: {}", differs(found))
            }
            Self::Populated { process, page } => {
                write!(formatter, "process {process}: page {page} is not reported as populated")
            }
            Self::Image { process, kind, found } => {
                write!(formatter, "the {kind:?} image of process {process}: {}", differs(found))
            }
            Self::Ended { process } => write!(formatter, "process {process} has ended by itself"),
            Self::Silent { process, waited } => {
                write!(formatter, "process {process} has not answered for {waited:?}")
            }
            Self::Failed { process, error } => write!(formatter, "process {process}: {error}"),
        }
    }
}

/// How often something has happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub operations: u64,
    pub checkpoints: u64,
    pub machines: u64,
    /// The most forks between a process and the first one.
    pub depth: u64,
    pub kills: u64,
    /// Forks that a kill came before, and after.
    pub kills_before_fork: u64,
    pub kills_after_fork: u64,
    pub images: u64,
    pub background_images: u64,
    pub checks: u64,
}

impl Counts {
    pub fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        self.checkpoints += other.checkpoints;
        self.machines += other.machines;
        self.depth = self.depth.max(other.depth);
        self.kills += other.kills;
        self.kills_before_fork += other.kills_before_fork;
        self.kills_after_fork += other.kills_after_fork;
        self.images += other.images;
        self.background_images += other.background_images;
        self.checks += other.checks;
    }
}

struct Process {
    number: usize,
    role: Role,
    link: Link,
    handle: OwnedFd,
    /// What it has been told to have.
    memory: Memory,
    /// Commands that it has not answered yet.
    open: usize,
    depth: u64,
    /// How long an answer may take.
    limit: Duration,
}

/// The processes of a case. They end when this is dropped.
pub struct Tree {
    first: Child,
    directory: tempfile::TempDir,
    listener: UnixListener,
    setup: Setup,
    processes: Vec<Process>,
    next_number: usize,
    limit: Duration,
    pub counts: Counts,
}

impl Setup {
    /// The content of the start.
    pub fn writes(&self) -> Vec<Span> {
        let span = |(index, run): (usize, &Run)| {
            let pages = run.within(self.size_pages());
            Span {
                way: Way::Pages,
                bytes: pages.start * PAGE..pages.end * PAGE,
                mark: first_mark(None) + index as u32,
            }
        };
        self.content.iter().enumerate().map(span).collect()
    }
}

/// Carries out a case; returns what has happened, and the difference to the model.
pub fn run(case: &Case) -> (Counts, Result<(), Violation>) {
    let mut tree = match Tree::new(&case.setup) {
        Ok(tree) => tree,
        Err(violation) => return (Counts::default(), Err(violation)),
    };
    let mut operations = case.operations.iter().enumerate();
    let result = operations
        .try_for_each(|(index, operation)| tree.carry_out(index, operation))
        .and_then(|()| tree.check_all());
    (tree.counts, result)
}

impl Tree {
    fn new(setup: &Setup) -> Result<Self, Violation> {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        listener.set_nonblocking(true).unwrap();
        let first = std::process::Command::new(std::env::current_exe().unwrap())
            .env(process::SETUP, serde_json::to_string(setup).unwrap())
            .env(process::SOCKET, &socket)
            .env("TMPDIR", directory.path())
            .spawn()
            .unwrap();
        let limit = match setup.flaw {
            Flaw::NotStill => Duration::from_secs(2),
            _ => Duration::from_secs(60),
        };
        let mut memory = Memory::new(setup.size_pages());
        for span in setup.writes() {
            memory.write(&span);
        }
        let mut tree = Self {
            first,
            directory,
            listener,
            setup: setup.clone(),
            processes: Vec::new(),
            next_number: 0,
            limit,
            counts: Counts::default(),
        };
        tree.wait_for_new(Role::Machine, &memory, 0)?;
        Ok(tree)
    }

    fn carry_out(&mut self, index: usize, operation: &Operation) -> Result<(), Violation> {
        let size_pages = self.setup.size_pages();
        let span = |write: &Write, number: usize| Span {
            way: write.way,
            bytes: write.bytes(size_pages),
            mark: match write.content {
                Content::Mark => first_mark(Some(index)) + number as u32,
                Content::Zeros => 0,
            },
        };
        self.counts.operations += 1;
        match operation {
            Operation::Write(pick, write) => {
                let Some(machine) = self.pick(*pick, Role::Machine) else { return Ok(()) };
                let span = span(write, 0);
                machine.memory.write(&span);
                machine.tell(&Command::Write(span))
            }
            Operation::Discard(pick, runs, tenure) => {
                let Some(machine) = self.pick(*pick, Role::Machine) else { return Ok(()) };
                machine.discard(runs, *tenure)
            }
            Operation::Reclaim(pick, run) => {
                let Some(machine) = self.pick(*pick, Role::Machine) else { return Ok(()) };
                machine.tell(&Command::Reclaim { pages: run.within(size_pages) })
            }
            Operation::DiscardZeros(pick, run) => {
                let Some(machine) = self.pick(*pick, Role::Machine) else { return Ok(()) };
                machine.tell(&Command::DiscardZeros { pages: run.within(size_pages) })
            }
            Operation::Advise(pick, advice) => {
                let Some(machine) = self.pick(*pick, Role::Machine) else { return Ok(()) };
                machine.tell(&Command::Advise(*advice))
            }
            Operation::Save(pick, kind, writes) => {
                let writes =
                    writes.iter().enumerate().map(|(number, write)| span(write, number)).collect();
                self.save(*pick, *kind, writes)
            }
            Operation::Checkpoint(pick) => self.fork(*pick, Role::Machine),
            Operation::Machine(pick) => self.fork(*pick, Role::Checkpoint),
            Operation::Check(pick, look) => {
                let index = *pick % self.processes.len();
                self.check(index, *look)
            }
            Operation::Kill(pick) => self.kill(*pick),
            Operation::KillInFork(pick, delay_us) => {
                self.kill_in_fork(*pick, Duration::from_micros(*delay_us))
            }
        }
    }

    /// One of the processes with this role.
    fn index_of(&self, pick: Pick, role: Role) -> Option<usize> {
        let of_role: Vec<usize> =
            (0..self.processes.len()).filter(|&index| self.processes[index].role == role).collect();
        (!of_role.is_empty()).then(|| of_role[pick % of_role.len()])
    }

    fn pick(&mut self, pick: Pick, role: Role) -> Option<&mut Process> {
        self.index_of(pick, role).map(|index| &mut self.processes[index])
    }

    fn fork(&mut self, pick: Pick, of: Role) -> Result<(), Violation> {
        if self.processes.len() == MOST_PROCESSES {
            return Ok(());
        }
        let Some(old) = self.pick(pick, of) else { return Ok(()) };
        old.ask(&Command::Fork)?;
        let (memory, depth) = (old.memory.clone(), old.depth + 1);
        self.wait_for_new(of.of_forked(), &memory, depth)
    }

    fn wait_for_new(&mut self, role: Role, memory: &Memory, depth: u64) -> Result<(), Violation> {
        let begun = Instant::now();
        while begun.elapsed() < self.limit {
            if self.accept(role, memory, depth)? {
                return Ok(());
            }
            thread::sleep(Duration::from_micros(100));
        }
        Err(Violation::Silent { process: self.next_number, waited: self.limit })
    }

    /// Takes up a process that has connected, if there is one.
    fn accept(&mut self, role: Role, memory: &Memory, depth: u64) -> Result<bool, Violation> {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => panic!("cannot accept: {error}"),
        };
        let process = self.next_number;
        self.next_number += 1;
        let pid = socket_peercred(&stream).unwrap().pid;
        let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) else {
            return Err(Violation::Ended { process });
        };
        let mut process = Process {
            number: process,
            role,
            link: Link::new(stream, Some(self.limit)).unwrap(),
            handle,
            memory: memory.clone(),
            open: 1,
            depth,
            limit: self.limit,
        };
        let born = process.next_answer();
        self.processes.push(process);
        born?;
        match role {
            Role::Checkpoint => self.counts.checkpoints += 1,
            Role::Machine if depth > 0 => self.counts.machines += 1,
            Role::Machine => {}
        }
        self.counts.depth = self.counts.depth.max(depth);
        Ok(true)
    }

    /// Ends a process, unless it is the last one.
    fn kill(&mut self, pick: Pick) -> Result<(), Violation> {
        if self.processes.len() == 1 {
            return Ok(());
        }
        let index = pick % self.processes.len();
        self.counts.kills += 1;
        let mut process = self.processes.remove(index);
        process.kill()
    }

    fn kill_in_fork(&mut self, pick: Pick, delay: Duration) -> Result<(), Violation> {
        if self.processes.len() == 1 {
            return Ok(());
        }
        let mut process = self.processes.remove(pick % self.processes.len());
        process.settle()?;
        process.tell(&Command::Fork)?;
        let begun = Instant::now();
        while begun.elapsed() < delay {
            std::hint::spin_loop();
        }
        process.kill()?;
        // Its descriptors are closed: the new process has connected by now, or there is none.
        if self.accept(process.role.of_forked(), &process.memory, process.depth + 1)? {
            self.counts.kills_after_fork += 1;
        } else {
            self.counts.kills_before_fork += 1;
        }
        Ok(())
    }

    fn save(&mut self, pick: Pick, kind: SaveKind, writes: Vec<Span>) -> Result<(), Violation> {
        let path = self.directory.path().join(format!("image-{}", self.counts.operations));
        let Some(machine) = self.pick(pick, Role::Machine) else { return Ok(()) };
        let at_moment = machine.memory.clone();
        for span in &writes {
            machine.memory.write(span);
        }
        let number = machine.number;
        let command = Command::Save { path: path.clone(), kind, writes };
        let Answer::Saved { image, kind } = machine.ask(&command)? else {
            return Err(Violation::Ended { process: number });
        };
        self.counts.images += 1;
        self.counts.background_images += u64::from(kind == SaveKind::Background);
        compare_image(&path, &image, &at_moment, number)?
            .map_or(Ok(()), |found| Err(Violation::Image { process: number, kind, found }))
    }

    fn check(&mut self, index: usize, look: Look) -> Result<(), Violation> {
        let process = &mut self.processes[index];
        let (number, role) = (process.number, process.role);
        // A checkpoint has no files of its own that say what is populated.
        let look = if role == Role::Checkpoint { Look::All } else { look };
        self.counts.checks += 1;
        let Answer::Hashes(hashes) = process.ask(&Command::Hash(look))? else {
            return Err(Violation::Ended { process: number });
        };
        let Some(page) = process.memory.differs_from(&hashes) else { return Ok(()) };
        let Answer::Page(content) = process.ask(&Command::Read { page })? else {
            return Err(Violation::Ended { process: number });
        };
        Err(match process.memory.compare(page, &content) {
            Some(found) => Violation::Content { process: number, role, found },
            None => Violation::Populated { process: number, page },
        })
    }

    fn check_all(&mut self) -> Result<(), Violation> {
        (0..self.processes.len()).try_for_each(|index| self.check(index, Look::All))
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
        }
        let _ = self.first.kill();
        let _ = self.first.wait();
    }
}

/// The difference between an image and the memory that it should have.
fn compare_image(
    path: &PathBuf,
    image: &RamImage,
    memory: &Memory,
    process: usize,
) -> Result<Option<Difference>, Violation> {
    let file = std::fs::File::open(path).unwrap();
    let mut content = vec![0; (memory.size_pages() * PAGE) as usize];
    let failed = |error: String| Violation::Failed { process, error };
    file.read_exact_at(&mut content, 0).map_err(|error| failed(error.to_string()))?;
    image.verify(&file, 0, &mut |_| {}).map_err(|error| failed(error.to_string()))?;
    std::fs::remove_file(path).unwrap();
    let mut pages = content.chunks_exact(PAGE as usize).enumerate();
    Ok(pages.find_map(|(page, content)| memory.compare(page as u64, content)))
}

impl Process {
    /// Tells it to do something, without waiting for the end.
    fn tell(&mut self, command: &Command) -> Result<(), Violation> {
        self.open += 1;
        self.link.send(command).map_err(|_| Violation::Ended { process: self.number })
    }

    /// Waits until everything is done; returns the answer to this.
    fn ask(&mut self, command: &Command) -> Result<Answer, Violation> {
        self.settle()?;
        self.tell(command)?;
        self.next_answer()
    }

    /// Waits until everything is done.
    fn settle(&mut self) -> Result<(), Violation> {
        while self.open > 0 {
            self.next_answer()?;
        }
        Ok(())
    }

    fn next_answer(&mut self) -> Result<Answer, Violation> {
        let process = self.number;
        self.open -= 1;
        match self.link.receive() {
            Ok(Some(Answer::Failed(error))) => Err(Violation::Failed { process, error }),
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(Violation::Ended { process }),
            Err(_) => Err(Violation::Silent { process, waited: self.limit }),
        }
    }

    fn discard(&mut self, runs: &[Run], tenure: Tenure) -> Result<(), Violation> {
        let size_pages = self.memory.size_pages();
        let pages: Vec<_> = runs.iter().map(|run| run.within(size_pages)).collect();
        for pages in &pages {
            self.memory.discard(pages.clone());
        }
        self.tell(&Command::Discard { pages, tenure })
    }

    /// Ends it, and waits until its memory and its descriptors are gone. What it has not begun is
    /// not done.
    fn kill(&mut self) -> Result<(), Violation> {
        let _ = pidfd_send_signal(&self.handle, Signal::KILL);
        loop {
            match self.link.receive::<Answer>() {
                Ok(Some(Answer::Failed(error))) => {
                    return Err(Violation::Failed { process: self.number, error });
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => {
                    return Err(Violation::Silent { process: self.number, waited: self.limit });
                }
            }
        }
        // Only then its children have another parent: this process, which takes them away.
        let mut ended = [PollFd::new(&self.handle, PollFlags::IN)];
        let _ = poll(&mut ended, None);
        let _ = waitid(WaitId::PidFd(self.handle.as_fd()), WaitIdOptions::EXITED);
        Ok(())
    }
}
