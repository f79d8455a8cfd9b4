//! Boots real virtual hosts and uses them as `ebb` and the lab do.
//!
//! The tests need QEMU and Debian's cloud kernel (`scripts/install-deps.sh`). A start takes a few
//! seconds, so tests share a host where possible. Only one host runs at a time, because each
//! emulated processor occupies one of this machine.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_virtual_host::{Command, ExitStatus, HostConfig, HostError, HostFile, Output, VirtualHost};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

fn config() -> HostConfig {
    HostConfig {
        memory_mib: 1024,
        init: Some(env!("CARGO_BIN_EXE_ebb-host-init").into()),
        time_limit: Duration::from_secs(240),
        ..HostConfig::default()
    }
}

fn shell(host: &VirtualHost, line: &str) -> String {
    let captured = host.output(&Command::shell(line).time_limit(Duration::from_secs(60))).unwrap();
    assert!(captured.status.success(), "{line}: {captured:?}");
    captured.text()
}

fn alive(process_id: u32) -> bool {
    // A process that was killed but not yet reaped has an empty command line.
    fs::read(format!("/proc/{process_id}/cmdline")).is_ok_and(|line| !line.is_empty())
}

#[test]
fn commands_files_and_devices() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let added = directory.path().join("added");
    fs::write(&added, "from outside").unwrap();
    let file = HostFile { source: added, target: "/opt/deep/added".into(), mode: Some(0o600) };
    let mut config = HostConfig { swap_mib: 256, huge_pages: 16, files: vec![file], ..config() };
    config.programs.push("/bin/ls".into());
    let host = VirtualHost::start(&config).unwrap();
    assert_eq!(host.hello().warnings, [] as [&str; 0]);

    exit_codes(&host);
    output_streams(&host);
    files_are_copied_in_both_directions(&host, directory.path());
    limits(&host);
    side_by_side(&host);

    assert_eq!(shell(&host, "cat /opt/deep/added"), "from outside");
    assert_eq!(shell(&host, "stat -c %a /opt/deep/added"), "600\n");
    assert_eq!(
        shell(&host, "cat /sys/kernel/mm/transparent_hugepage/enabled"),
        "[always] madvise never\n"
    );
    // A dynamic program of this machine runs with the copied libraries.
    assert!(shell(&host, "/bin/ls --version").contains("coreutils"));
    assert_eq!(shell(&host, "cat /proc/sys/vm/nr_hugepages"), "16\n");
    assert_eq!(shell(&host, "head -c 4 /ebb/vmlinux | od -An -c | tr -d ' '"), "177ELF\n");
    assert_eq!(
        shell(
            &host,
            "cat /sys/devices/system/clocksource/clocksource0/current_clocksource | cut -c1-3"
        ),
        "tsc\n"
    );
    let sample = host.sample().unwrap();
    assert_eq!(sample.meminfo["SwapTotal"], 256 * 1024 - 4);
    assert_eq!(sample.swap_used_kib(), 0);
    assert_eq!(sample.nodes.len(), 1);
    // A shaped link between network namespaces is possible.
    shell(&host, "ls -d /sys/module/veth /sys/module/sch_tbf");
    // Process 1 reaps orphans.
    shell(&host, "(sleep 0.1 &) ; sleep 0.5; ! grep -l '^State:.*Z' /proc/[0-9]*/status");

    let process_id = host.process_id();
    assert!(alive(process_id));
    host.shutdown().unwrap();
    assert!(!alive(process_id));
}

fn exit_codes(host: &VirtualHost) {
    let status = |line: &str| host.output(&Command::shell(line)).unwrap().status;
    assert_eq!(status("true"), ExitStatus::Code(0));
    assert_eq!(status("exit 37"), ExitStatus::Code(37));
    assert_eq!(status("kill -TERM $$"), ExitStatus::Signal(15));
    let error = host.output(&Command::new("no-such-program")).unwrap_err().to_string();
    assert!(error.contains("no-such-program"), "{error}");
    let command = Command::new("sh").args(["-c", "echo $A:$PWD"]).env("A", "b c").directory("/tmp");
    assert_eq!(host.output(&command).unwrap().text(), "b c:/tmp\n");
}

fn output_streams(host: &VirtualHost) {
    // Output is live: the second line is written only after the first has arrived here and been
    // answered with a file.
    let line =
        "echo first; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo second; echo third >&2";
    let mut seen = Vec::new();
    let command = Command::shell(line).time_limit(Duration::from_secs(60));
    let status = host
        .run(&command, &mut |output| {
            if output == Output::Stdout(b"first\n") {
                host.put("/tmp/go", 0o644, 0, &[][..]).unwrap();
            }
            seen.push(match output {
                Output::Stdout(bytes) => ("out", String::from_utf8_lossy(bytes).into_owned()),
                Output::Stderr(bytes) => ("err", String::from_utf8_lossy(bytes).into_owned()),
            });
        })
        .unwrap();
    assert!(status.success());
    seen[1..].sort();
    let text = |stream, line: &str| (stream, line.to_owned());
    assert_eq!(seen, [text("out", "first\n"), text("err", "third\n"), text("out", "second\n")]);

    // Both streams exceed all buffers in between, and no output is lost.
    let captured = host.output(&Command::shell("seq 300000; seq 100000 >&2")).unwrap();
    assert_eq!(captured.text().lines().count(), 300_000);
    assert!(captured.stdout.ends_with(b"\n300000\n") && captured.stderr.ends_with(b"\n100000\n"));
}

fn files_are_copied_in_both_directions(host: &VirtualHost, directory: &Path) {
    let content: Vec<u8> = (0..3_000_000_u32).map(|index| (index * 7 / 3) as u8).collect();
    let (source, back) = (directory.join("source"), directory.join("back"));
    fs::write(&source, &content).unwrap();
    host.put_file(&source, "/root/new/place/file", 0o750).unwrap();
    assert_eq!(shell(host, "stat -c '%a %s' /root/new/place/file"), "750 3000000\n");
    assert_eq!(host.get_file("/root/new/place/file", &back).unwrap(), 3_000_000);
    assert!(fs::read(&back).unwrap() == content);

    // Files of /proc report no length.
    let mut version = Vec::new();
    host.get("/proc/version", &mut version).unwrap();
    assert!(version.starts_with(b"Linux version"));
    let error = host.get_file("/no/such", &directory.join("none")).unwrap_err().to_string();
    assert!(error.contains("/no/such") && !directory.join("none").exists(), "{error}");
    let error = host.put("/proc/no/such", 0o644, 3, &b"abc"[..]).unwrap_err().to_string();
    assert!(error.contains("/proc/no/such"), "{error}");
    assert_eq!(shell(host, "echo fine"), "fine\n");
}

fn limits(host: &VirtualHost) {
    let command = Command::shell("sleep 1000 & sleep 1000").time_limit(Duration::from_millis(300));
    let error = host.output(&command).unwrap_err();
    assert!(matches!(error, HostError::CommandTimeLimit { .. }), "{error}");
    assert!(error.to_string().contains("sleep 1000"), "{error}");
    assert_eq!(
        shell(host, "pidof sleep || echo none"),
        "none\n",
        "the whole process group was killed"
    );

    // A background process that keeps the output open does not delay the command's end.
    let started = Instant::now();
    host.output(&Command::shell("sleep 1000 & echo started")).unwrap();
    assert!(started.elapsed() < Duration::from_secs(500));
    shell(host, "killall sleep");
}

fn side_by_side(host: &VirtualHost) {
    std::thread::scope(|scope| {
        let waiting = scope
            .spawn(|| shell(host, "while [ ! -e /tmp/second ]; do sleep 0.05; done; echo one"));
        assert_eq!(shell(host, "touch /tmp/second; echo two"), "two\n");
        assert_eq!(waiting.join().unwrap(), "one\n");
    });
}

/// `KVM_CREATE_VM` works and a guest's processor runs, both at the nested level.
#[test]
fn kvm_runs_guests_and_nodes_are_as_configured() {
    let _alone = alone();
    let nodes = vec!["size=700M,cpus=0".parse().unwrap(), "size=500M,cpus=1".parse().unwrap()];
    let host = VirtualHost::start(&HostConfig { nodes, ..config() }).unwrap();
    assert_eq!(shell(&host, "cat /sys/devices/system/node/online"), "0-1\n");
    assert_eq!(shell(&host, "cat /sys/devices/system/node/node1/cpulist"), "1\n");
    let sample = host.sample().unwrap();
    let total_mib = |node: usize| sample.nodes[node]["MemTotal"] / 1024;
    assert!((500..700).contains(&total_mib(0)) && (400..500).contains(&total_mib(1)), "{sample:?}");

    processors_that_have_lost_a_timer_go_on(&host);

    // This test program is static: it is copied into the host and runs the ignored test below.
    host.put_file(&std::env::current_exe().unwrap(), "/tmp/test", 0o755).unwrap();
    let inner = Command::new("/tmp/test").args(["--ignored", "--exact", "inside_a_guest_computes"]);
    let captured = host.output(&inner.time_limit(Duration::from_secs(60))).unwrap();
    assert!(captured.status.success() && captured.text().contains("1 passed"), "{captured:?}");
}

/// Each processor, idle or not, is interrupted by another four times a second
/// (`src/inside/visits.rs`), here at least twice.
fn processors_that_have_lost_a_timer_go_on(host: &VirtualHost) {
    const SECONDS: u64 = 3;
    let line = format!("grep RES: /proc/interrupts; sleep {SECONDS}; grep RES: /proc/interrupts");
    let text = shell(host, &line);
    let counts: Vec<Vec<u64>> = text
        .lines()
        .map(|line| line.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect())
        .collect();
    let [before, after] = &counts[..] else { panic!("{text}") };
    assert_eq!(after.len(), 3, "{text}");
    assert!(
        before.iter().zip(after).all(|(before, after)| after - before >= 2 * SECONDS),
        "{text}"
    );
}

/// A machine with one vCPU in real mode at the first instruction of `code`; the memory must outlive
/// it.
fn machine(code: [u8; 24]) -> (kvm_ioctls::VmFd, kvm_ioctls::VcpuFd, ebb_agent::memory::Mapping) {
    let mut memory = ebb_agent::memory::Mapping::new(4096).unwrap();
    for (word, bytes) in memory.words_mut().iter_mut().zip(code.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    let vm = kvm_ioctls::Kvm::new().unwrap().create_vm().unwrap();
    let region = kvm_bindings::kvm_userspace_memory_region {
        guest_phys_addr: 0x1000,
        memory_size: 4096,
        userspace_addr: memory.words().as_ptr() as u64,
        ..Default::default()
    };
    // SAFETY: `memory` is mapped, page-aligned, and outlives the machine.
    unsafe { vm.set_user_memory_region(region) }.unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    let mut special = vcpu.get_sregs().unwrap();
    (special.cs.base, special.cs.selector) = (0, 0);
    vcpu.set_sregs(&special).unwrap();
    vcpu.set_regs(&kvm_bindings::kvm_regs { rip: 0x1000, rflags: 2, ..Default::default() })
        .unwrap();
    (vm, vcpu, memory)
}

#[test]
#[ignore = "runs inside the virtual host"]
fn inside_a_guest_computes() {
    use kvm_ioctls::VcpuExit;

    // ecx = 1000000; eax = sum of ecx, ecx - 1, … 1; out 0x10, eax; hlt
    let code: [u8; 24] = [
        0x66, 0xb9, 0x40, 0x42, 0x0f, 0x00, 0x66, 0x31, 0xc0, 0x66, 0x01, 0xc8, 0x67, 0xe2, 0xfa,
        0x66, 0xe7, 0x10, 0xf4, 0, 0, 0, 0, 0,
    ];
    let (_vm, mut vcpu, _memory) = machine(code);
    match vcpu.run().unwrap() {
        VcpuExit::IoOut(0x10, data) => {
            let sum = (1..=1_000_000_u32).fold(0, u32::wrapping_add);
            assert_eq!(data, sum.to_le_bytes());
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
}

/// Loses interrupts, once in a minute or so: see `src/inside/visits.rs`, without which a processor
/// of the host stands still then.
#[test]
#[ignore = "takes minutes, and depends on luck"]
fn lost_interrupts_are_found() {
    let _alone = alone();
    let host = VirtualHost::start(&config()).unwrap();
    host.put_file(&std::env::current_exe().unwrap(), "/tmp/test", 0o755).unwrap();
    let inner = ["--ignored", "--exact", "--nocapture", "inside_interrupts_are_lost"];
    let inner = Command::new("/tmp/test").args(inner);
    let captured = host.output(&inner.time_limit(Duration::from_secs(200))).unwrap();
    println!("{}", captured.text());
    assert!(captured.status.success(), "{captured:?}");
}

/// A vCPU that exits all the time, with interrupts disabled and a window for one requested, and a
/// thread that sleeps again and again, both on processor 1, which a third one watches.
#[test]
#[ignore = "runs inside the virtual host"]
fn inside_interrupts_are_lost() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    use std::thread;

    const RUN: Duration = Duration::from_secs(150);
    fn only_on(processor: usize) {
        let mut set = rustix::thread::CpuSet::new();
        set.set(processor);
        rustix::thread::sched_setaffinity(None, &set).unwrap();
    }
    only_on(2);
    thread::spawn(|| {
        only_on(1);
        // xor eax, eax; cpuid; jmp to cpuid
        let mut code = [0; 24];
        code[..6].copy_from_slice(&[0x31, 0xc0, 0x0f, 0xa2, 0xeb, 0xfa]);
        let (_vm, mut vcpu, _memory) = machine(code);
        vcpu.get_kvm_run().request_interrupt_window = 1;
        panic!("{:?}", vcpu.run());
    });
    let (sleeps, longest_us) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (counted, longest) = (sleeps.clone(), longest_us.clone());
    thread::spawn(move || {
        only_on(1);
        loop {
            let started = Instant::now();
            thread::sleep(Duration::from_micros(50));
            longest.fetch_max(started.elapsed().as_micros() as u64, Relaxed);
            counted.fetch_add(1, Relaxed);
        }
    });
    let started = Instant::now();
    let (mut before, mut still) = (0, Instant::now());
    while started.elapsed() < RUN {
        thread::sleep(Duration::from_millis(100));
        let now = sleeps.load(Relaxed);
        if now != before {
            (before, still) = (now, Instant::now());
        }
        assert!(still.elapsed() < Duration::from_secs(20), "{before} sleeps, then none");
    }
    println!("{before} sleeps, the longest {} us", longest_us.load(Relaxed));
}

#[test]
fn dropping_a_host_leaves_nothing_behind() {
    let _alone = alone();
    let before = descriptors();
    let host = VirtualHost::start(&HostConfig { swap_mib: 64, ..config() }).unwrap();
    let process_id = host.process_id();
    std::thread::scope(|scope| {
        // A host that dies during a command causes an error and no hang.
        let running = scope.spawn(|| host.output(&Command::shell("sleep 1000")));
        let crash = host.output(&Command::shell("sleep 0.3; echo c > /proc/sysrq-trigger"));
        for result in [crash, running.join().unwrap()] {
            let error = result.unwrap_err();
            assert!(matches!(error, HostError::Ended { .. }), "{error}");
        }
    });
    let error = host.sample().unwrap_err().to_string();
    assert!(error.contains("sysrq"), "the error shows the end of the console: {error}");
    drop(host);
    assert!(!alive(process_id));

    // A second of this host's clock is four of this machine's.
    let host = VirtualHost::start(&HostConfig { clock_divisor: 4, ..config() }).unwrap();
    let started = Instant::now();
    host.output(&Command::shell("sleep 1")).unwrap();
    assert!(started.elapsed() > Duration::from_secs(3));
    let process_id = host.process_id();
    drop(host);
    assert!(!alive(process_id));
    assert_eq!(descriptors(), before);
}

fn descriptors() -> usize {
    // Reader threads close their ends shortly after QEMU's; wait until the number is stable.
    let count = || fs::read_dir("/proc/self/fd").unwrap().count();
    let mut last = count();
    loop {
        std::thread::sleep(Duration::from_millis(100));
        let now = count();
        if now == last {
            return now;
        }
        last = now;
    }
}

#[test]
fn limits_of_the_host_and_failures_at_start() {
    let _alone = alone();
    let host = VirtualHost::start(&HostConfig { time_limit: Duration::from_secs(20), ..config() })
        .unwrap();
    let error = host.output(&Command::shell("sleep 1000")).unwrap_err();
    assert!(matches!(error, HostError::HostTimeLimit { .. }), "{error}");
    let process_id = host.process_id();
    drop(host);
    assert!(!alive(process_id));

    let never = HostConfig { boot_limit: Duration::from_millis(50), ..config() };
    assert!(matches!(VirtualHost::start(&never).unwrap_err(), HostError::BootTimeout { .. }));

    // An init that ends at once makes the kernel panic; the console's tail shows it.
    let broken = HostConfig { kernel_arguments: "rdinit=/bin/false".to_owned(), ..config() };
    let error = VirtualHost::start(&broken).unwrap_err();
    assert!(matches!(error, HostError::EndedAtStart { .. }), "{error}");
    assert!(error.to_string().to_lowercase().contains("panic"), "{error}");

    let dynamic = HostConfig { init: Some("/bin/sh".into()), ..config() };
    assert!(matches!(VirtualHost::start(&dynamic).unwrap_err(), HostError::InitUnusable { .. }));
    let large = HostConfig { memory_mib: 1 << 40, ..config() };
    assert!(matches!(VirtualHost::start(&large).unwrap_err(), HostError::TooLittleMemory { .. }));
}
