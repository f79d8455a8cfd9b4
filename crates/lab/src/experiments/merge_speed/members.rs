//! The processes whose memory is merged, as the lab sees them.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::content::Shape;
use super::member::{Answer, COMMAND, Means, Order, Progress, Task};
use crate::LabError;
use crate::harness::guest_process::end_with_parent;
use crate::harness::maps::{self, FRAME, PRESENT};
use crate::harness::proc;

/// The part of memory that must be in huge pages where a shape has them.
const HUGE_PERCENT: u64 = 90;

/// The processes of a memory; killed when dropped.
#[derive(Debug)]
pub(super) struct Members {
    all: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    memory: Vec<Range<u64>>,
}

fn failed(error: impl std::fmt::Display) -> LabError {
    LabError::Merging(format!("a process whose memory is merged: {error}"))
}

impl Members {
    /// Starts the processes of a shape; returns when all memory is written.
    ///
    /// # Errors
    /// [`LabError::Merging`], also if the machine has no huge pages for a shape that needs them.
    pub(super) fn start(
        shape: Shape,
        pages: usize,
        seed: u64,
        means: &Means,
    ) -> Result<Self, LabError> {
        let all = (0..shape.processes()).map(|_| Member::start()).collect::<Result<_, _>>()?;
        let mut members = Self { all };
        for (member, process) in members.all.iter_mut().zip(0..) {
            member.send(&Task { shape, pages, seed, process, means: means.clone() })?;
        }
        for member in &mut members.all {
            match member.receive()? {
                Answer::Ready(memory) => member.memory = memory,
                other => return Err(unexpected(&other)),
            }
        }
        let huge = members.huge_pages()? * proc::HUGE_PAGE_PAGES;
        if shape.huge_pages() == ebb_guest_ram::HugePages::On
            && huge * 100 < pages as u64 * HUGE_PERCENT
        {
            return Err(failed(format!(
                "only {huge} of {pages} pages are in huge pages; allow them (write madvise to \
                 /sys/kernel/mm/transparent_hugepage/enabled), or free memory"
            )));
        }
        Ok(members)
    }

    /// Numbers of the processes.
    pub(super) fn pids(&self) -> impl Iterator<Item = u32> {
        self.all.iter().map(|member| member.process.id())
    }

    /// Number of pages of all memory.
    pub(super) fn pages(&self) -> u64 {
        let ranges = self.all.iter().flat_map(|member| &member.memory);
        ranges.map(|range| (range.end - range.start) / maps::PAGE_BYTES).sum()
    }

    /// Lets all of them do this at the same time.
    fn all(&mut self, order: Order) -> Result<Vec<Answer>, LabError> {
        for member in &mut self.all {
            member.send(&order)?;
        }
        self.all.iter_mut().map(Member::receive).collect()
    }

    fn count(&mut self, order: Order) -> Result<u64, LabError> {
        let count = |answer| match answer {
            Answer::Pages(pages) => Ok(pages),
            other => Err(unexpected(&other)),
        };
        self.all(order)?.into_iter().map(count).sum()
    }

    /// Lets them scan their memory this number of times; the sums of their progress.
    pub(super) fn pass(&mut self, passes: u64) -> Result<Progress, LabError> {
        let mut sum = Progress::default();
        for answer in self.all(Order::Pass(passes))? {
            let Answer::Progress(progress) = answer else { return Err(unexpected(&answer)) };
            sum.merged += progress.merged;
            sum.read += progress.read;
            sum.metadata_bytes += progress.metadata_bytes;
        }
        Ok(sum)
    }

    /// Lets them read each page.
    pub(super) fn read(&mut self) -> Result<(), LabError> {
        self.count(Order::Read).map(|_| ())
    }

    /// Lets them compare all memory with what they have written.
    pub(super) fn check(&mut self, when: &str) -> Result<(), LabError> {
        match self.count(Order::Check)? {
            0 => Ok(()),
            wrong => Err(LabError::Merging(format!(
                "{wrong} pages have another content after they were {when}"
            ))),
        }
    }

    /// Sends an order to the first process only.
    pub(super) fn first(&mut self, order: Order) -> Result<Option<f64>, LabError> {
        let Some(member) = self.all.first_mut() else { return Ok(None) };
        member.send(&order)?;
        match member.receive()? {
            Answer::Ns(value) | Answer::Rate(value) => Ok(value),
            other => Err(unexpected(&other)),
        }
    }

    /// Counts the page frames of all memory, each once however often it is mapped; all pages must
    /// have been read. This counts shared pages independently of what merges. Needs root.
    pub(super) fn frames(&self) -> Result<u64, LabError> {
        let mut frames: Vec<u64> = Vec::new();
        for member in &self.all {
            let path = format!("/proc/{}/pagemap", member.process.id());
            let pagemap = File::open(&path).map_err(LabError::of_file(&path))?;
            for range in &member.memory {
                let count = ((range.end - range.start) / maps::PAGE_BYTES) as usize;
                let entries = maps::entries(&pagemap, range.start / maps::PAGE_BYTES, count)
                    .map_err(LabError::of_file(&path))?;
                let present = entries.iter().filter(|entry| *entry & PRESENT != 0);
                frames.extend(present.map(|entry| entry & FRAME));
            }
        }
        if frames.iter().all(|frame| *frame == 0) {
            return Err(failed("the kernel shows page frames to root only"));
        }
        frames.sort_unstable();
        frames.dedup();
        Ok(frames.len() as u64)
    }

    /// Huge pages of all memory.
    pub(super) fn huge_pages(&self) -> Result<u64, LabError> {
        let of = |pid: u32| {
            let path = format!("/proc/{pid}/smaps_rollup");
            let text = fs::read_to_string(&path).map_err(LabError::of_file(&path))?;
            proc::huge_pages(&text)
                .ok_or(LabError::MissingField { path: path.into(), field: "AnonHugePages" })
        };
        self.pids().map(of).sum()
    }
}

impl Member {
    fn start() -> Result<Self, LabError> {
        let program = std::env::current_exe().map_err(failed)?;
        let mut command = Command::new(&program);
        command.arg(COMMAND).stdin(Stdio::piped()).stdout(Stdio::piped());
        end_with_parent(&mut command);
        let mut process = command.spawn().map_err(|cause| LabError::StartMonitor {
            program: program.display().to_string(),
            cause,
        })?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        let (input, output) = input.zip(output).ok_or_else(|| failed("it has no pipes"))?;
        Ok(Self { process, input, output: BufReader::new(output), memory: Vec::new() })
    }

    fn send(&mut self, message: &impl serde::Serialize) -> Result<(), LabError> {
        let line = serde_json::to_string(message).map_err(failed)?;
        writeln!(self.input, "{line}").map_err(failed)
    }

    fn receive(&mut self) -> Result<Answer, LabError> {
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(failed)?;
        if line.is_empty() {
            return Err(failed("it has ended"));
        }
        serde_json::from_str(&line).map_err(failed)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // It may have ended already; its memory is freed only when it has been waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn unexpected(answer: &Answer) -> LabError {
    match answer {
        Answer::Failed(reason) => LabError::Merging(reason.clone()),
        other => failed(format!("it answers {other:?}")),
    }
}
