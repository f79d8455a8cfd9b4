//! `ebb merge-broker`: owns the stable pages that machines of one trust domain share.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use ebb_migration::session::Address;
use ebb_page_merge::broker::{Broker, BrokerConfig, BrokerStatus, DomainRule, Limits, ask_status};
use ebb_page_merge::{MAX_PAGE_SHARING, Nodes};
use ebb_vmm::config::Switch;
use ebb_vmm::seccomp::{ThreadFilter, ThreadKind};
use ebb_vmm::size::ByteSize;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

use crate::flags::word;

const PAGE_BYTES: u64 = 4096;

const AFTER_HELP: &str = "\
Machines that merge their own memory (merge=owner, merge_domain=NAME and merge_broker=PATH of
ebb run --memory) share pages with other machines of the same trust domain through a broker. It
passes them memory files that only the broker can write to, and frees a page when the last process
that has it mapped has ended or released it. Machines of different domains never share anything:
a machine that shares pages can find out, from the time that a write takes, which pages others
have.

When the broker listens, it prints its address: \"listening on unix:/run/ebb-merge.sock\".
On SIGTERM, SIGINT or SIGHUP it removes the socket and ends. Machines then keep the pages that they
share, and merge no further ones with others until there is a broker at the same path again.

Only processes of root and of the broker's user can be clients, unless --domain says otherwise.

Examples:
  ebb merge-broker --listen unix:/run/ebb-merge.sock --quota 8G
  ebb merge-broker --listen unix:/run/ebb-merge.sock --domain blue=1001 --domain green=1002
  ebb merge-broker --status /run/ebb-merge.sock --json";

/// Own the stable pages that machines of one trust domain share, or show the state of such a
/// broker.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP, next_line_help = true)]
pub struct Args {
    /// Where to listen
    #[arg(
        long,
        value_name = "unix:PATH",
        required_unless_present = "status",
        conflicts_with = "status"
    )]
    listen: Option<Address>,
    /// Show the state of the broker that listens there
    #[arg(long, value_name = "PATH")]
    status: Option<PathBuf>,
    /// A domain to serve, and the number of the user whose machines may join it [default: any, for
    /// the broker's user]
    #[arg(long, value_name = "NAME[=UID]", conflicts_with = "status")]
    domain: Vec<DomainRule>,
    /// Maximum number of bytes of a domain's stable pages; one machine may create half of them
    /// [default: a quarter of the memory of the host, or of the broker's cgroup]
    #[arg(long, value_name = "SIZE", conflicts_with = "status")]
    quota: Option<ByteSize>,
    /// Maximum number of bytes of the stable pages of all domains together [default: half of that
    /// memory, or the quota if that is more]
    #[arg(long, value_name = "SIZE", conflicts_with = "status")]
    total: Option<ByteSize>,
    /// Maximum number of sharers of one stable page; beyond it, duplicates are created
    #[arg(
        long,
        value_name = "N",
        default_value_t = Limits::default().max_page_sharing,
        value_parser = clap::value_parser!(u32).range(2..=i64::from(MAX_PAGE_SHARING)),
        conflicts_with = "status"
    )]
    max_page_sharing: u32,
    /// System call filter
    #[arg(long, default_value = "on", value_parser = word::<Switch>(), conflicts_with = "status")]
    seccomp: Switch,
    /// Print JSON: one line when it listens, or the state
    #[arg(long)]
    json: bool,
}

/// Serves until a signal arrives, or prints the state of a broker.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(path) = &args.status {
        return show(path, args.json);
    }
    let path = match args.listen {
        Some(Address::Unix { path }) => path,
        Some(other) => {
            bail!(
                "a broker cannot listen at {other}, since it hands out file descriptors; use \
                 unix:PATH"
            )
        }
        None => bail!("--listen unix:PATH is missing"),
    };
    let memory_bytes = memory_bytes();
    let quota_bytes = args.quota.map_or(memory_bytes / 4, ByteSize::bytes);
    let total_bytes = args.total.map_or((memory_bytes / 2).max(quota_bytes), ByteSize::bytes);
    for (option, bytes) in [("--quota", quota_bytes), ("--total", total_bytes)] {
        if bytes < PAGE_BYTES {
            bail!("{option} leaves no room for any page: it must be at least {PAGE_BYTES} bytes");
        }
    }
    let limits = Limits { max_page_sharing: args.max_page_sharing, ..Limits::default() }
        .with_quota(quota_bytes)
        .with_total(total_bytes);
    let config = BrokerConfig { path, domains: args.domain, limits };
    // Each client takes two descriptors.
    raise_descriptor_limit();
    let signals = ebb_vmm::vm::Signals::block().context("cannot wait for signals")?;
    let mut broker = Broker::bind(config)?;
    let filter = ThreadFilter::alone(ThreadKind::Broker, args.seccomp)?;
    announce(broker.path(), args.json)?;
    filter.apply()?;
    broker.run(signals.as_fd())?;
    Ok(ExitCode::SUCCESS)
}

fn announce(path: &Path, json: bool) -> anyhow::Result<()> {
    let address = format!("unix:{}", path.display());
    let line = if json {
        json!({ "listening": address }).to_string()
    } else {
        format!("listening on {address}")
    };
    let mut output = std::io::stdout().lock();
    writeln!(output, "{line}")
        .and_then(|()| output.flush())
        .context("cannot write to standard output")
}

fn show(path: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let status = ask_status(path, Duration::from_secs(5))?;
    let text =
        if json { format!("{}\n", serde_json::to_string_pretty(&status)?) } else { table(&status) };
    std::io::stdout()
        .lock()
        .write_all(text.as_bytes())
        .context("cannot write to standard output")?;
    Ok(ExitCode::SUCCESS)
}

fn table(status: &BrokerStatus) -> String {
    let mut text = format!("clients {}", status.clients);
    // Writing into a String cannot fail.
    if status.lost_clients > 0 {
        let _ = write!(
            text,
            ", and {} that lost their connection but still share pages",
            status.lost_clients
        );
    }
    let _ = writeln!(text, ", refused {}", status.refused);
    for domain in &status.domains {
        let nodes = match domain.placement {
            Nodes::Across => "merged across nodes",
            Nodes::Apart => "nodes kept apart",
        };
        let _ = writeln!(
            text,
            "domain {}: {} clients, {nodes}, {} segments of {} pages in all",
            domain.name, domain.clients, domain.segments, domain.segment_pages
        );
        for node in &domain.nodes {
            let place =
                node.node.map_or_else(|| "any node".to_owned(), |node| format!("node {node}"));
            let _ = writeln!(
                text,
                "  {place}: {} stable pages, {} sharers, {} being created, {} saved, {} hashes \
                 remembered",
                node.stable_pages,
                node.sharers,
                node.reservations,
                ByteSize::from_bytes(node.saved_pages() * PAGE_BYTES),
                node.remembered_hashes
            );
        }
    }
    text
}

/// The memory that this process can have: the host's, or what its cgroup may use.
fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    let host_bytes = (info.totalram as u64).saturating_mul(info.mem_unit.into());
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    cgroup_limit(Path::new("/sys/fs/cgroup"), &groups).map_or(host_bytes, |it| it.min(host_bytes))
}

/// The lowest `memory.max` of a process's cgroup (version 2) and those that it is in, below `root`.
/// `groups` is the process's `/proc/PID/cgroup` (cgroups(7)).
fn cgroup_limit(root: &Path, groups: &str) -> Option<u64> {
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let limit = |folder: &Path| -> Option<u64> {
        fs::read_to_string(root.join(folder).join("memory.max")).ok()?.trim().parse().ok()
    };
    Path::new(group).ancestors().filter_map(limit).min()
}

fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::debug!("cannot raise the limit of open files: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_of_a_cgroup_and_those_around_it_counts() {
        let root = tempfile::tempdir().unwrap();
        let limits = [("a", "8192\n"), ("a/b", "4096\n"), ("a/b/c", "max\n"), ("d", "max\n")];
        for (folder, limit) in limits {
            fs::create_dir_all(root.path().join(folder)).unwrap();
            fs::write(root.path().join(folder).join("memory.max"), limit).unwrap();
        }
        let limit = |groups: &str| cgroup_limit(root.path(), groups);
        assert_eq!(limit("0::/a/b/c\n"), Some(4096));
        assert_eq!(limit("1:name=systemd:/x\n0::/a\n"), Some(8192));
        for none in ["0::/d\n", "0::/\n", "0::/nowhere\n", "4:memory:/a\n", ""] {
            assert_eq!(limit(none), None, "{none}");
        }
    }
}
