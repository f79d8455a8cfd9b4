use super::Switch::{Off, On};
use super::options::parse_balloon;
use super::*;
use crate::mmds::{DEFAULT_ADDRESS, Metadata, Served};
use proptest::prelude::*;

fn config(memory: &str, cpus: u8, numa: &[&str]) -> VmConfig {
    VmConfig {
        boot: Some(BootFiles { kernel: "vmlinuz".into(), initrd: None }),
        cmdline: String::new(),
        cpus,
        memory: memory.parse().unwrap(),
        numa: numa.iter().map(|node| node.parse().unwrap()).collect(),
        balloon: Some(BalloonDeviceConfig::default()),
        disks: Vec::new(),
        rng: None,
        nets: Vec::new(),
        vsock: None,
        serial: SerialConfig::Null,
        api: None,
        seccomp: On,
        isolation: IsolationConfig::default(),
        on_reboot: RebootAction::Reset,
        clock: ClockPolicy::Continue,
        forkable: Off,
    }
}

#[test]
fn memory_is_parsed_with_defaults() {
    let memory: MemoryConfig = "size=4G".parse().unwrap();
    assert_eq!(memory.size.bytes(), 4 << 30);
    assert_eq!(memory.backing, Backing::Anonymous);
    assert_eq!(memory.huge_pages, HugePages::On);
    assert_eq!(memory.populate, Populate::Lazy);
    assert_eq!("4G".parse::<MemoryConfig>().unwrap(), memory);
    let bare: MemoryConfig = "4G,thp=off".parse().unwrap();
    assert_eq!(bare, "size=4G,thp=off".parse().unwrap());
    let memory: MemoryConfig = "backing=hugetlb,prealloc=on,size=512M,thp=off".parse().unwrap();
    assert_eq!(memory.backing, Backing::Hugetlb2M);
    assert_eq!(memory.huge_pages, HugePages::Off);
    assert_eq!(memory.populate, Populate::Prealloc);
}

#[test]
fn errors_name_the_option_and_the_remedy() {
    let error = |text: &str| text.parse::<MemoryConfig>().unwrap_err().to_string();
    assert!(error("size=4Q").contains("`size=4Q`"));
    assert!(error("siez=4G").contains("`size` is missing"));
    assert!(error("size=4G,siez=3").contains("`siez` is unknown"));
    assert!(error("size=4G,size=3G").contains("given twice"));
    assert!(error("4G,size=3G").contains("given twice"));
    assert!(error("size=4G,backing=floppy").contains("anon, memfd, hugetlb"));
    assert!(error("size=4G,prealloc").contains("key=value"));
    assert!(parse_balloon("size=1G,statistics=often").unwrap_err().to_string().contains("seconds"));
    assert!("cpus=0".parse::<NumaNodeConfig>().unwrap_err().to_string().contains("size"));
    assert!("size=1G,cpus=3-1".parse::<NumaNodeConfig>().is_err());
    assert!("readonly=on".parse::<DiskConfig>().unwrap_err().to_string().contains("path"));
    assert!("file=".parse::<SerialConfig>().is_err());
    assert!("file=/x,max=1K".parse::<SerialConfig>().unwrap_err().to_string().contains("4K"));
    assert!("file=/x,bandwidth_burst=1K".parse::<SerialConfig>().is_err());
}

#[test]
fn balloon_options() {
    assert_eq!(parse_balloon("off").unwrap(), None);
    assert_eq!(parse_balloon("").unwrap(), Some(BalloonDeviceConfig::default()));
    let balloon = parse_balloon("size=1G,reporting=off,statistics=2").unwrap().unwrap();
    assert_eq!(balloon.size.bytes(), 1 << 30);
    assert_eq!(balloon.reporting, Off);
    assert_eq!(balloon.statistics_interval, Some(Duration::from_secs(2)));
    assert_eq!((balloon.page_bitmap, balloon.page_ranges, balloon.host_requests), (On, On, On));
    let plain =
        parse_balloon("page_bitmap=off,page_ranges=off,host_requests=off").unwrap().unwrap();
    assert_eq!((plain.page_bitmap, plain.page_ranges, plain.host_requests), (Off, Off, Off));
    assert_eq!((plain.init_reported, plain.init_on_inflate), (Off, Off));
    let zero = parse_balloon("init_reported=on,init_on_inflate=on").unwrap().unwrap();
    assert_eq!((zero.init_reported, zero.init_on_inflate), (On, On));
    for text in
        ["page_bitmap=1", "page_ranges=", "host_requests=yes", "host_requests=on,host_requests=on"]
    {
        let error = parse_balloon(text).unwrap_err().to_string();
        assert!(error.contains("on, off") || error.contains("twice"), "{error}");
    }
}

#[test]
fn contradictions_are_refused() {
    assert_eq!(config("64M", 1, &[]).validate(), Ok(()));
    let problem = |config: VmConfig| config.validate().unwrap_err().to_string();
    assert!(problem(config("1M", 1, &[])).contains("too little"));
    assert!(problem(config("67108865", 1, &[])).contains("multiple"));
    assert!(problem(config("64M", 0, &[])).contains("--cpus"));
    let mut large_balloon = config("64M", 1, &[]);
    large_balloon.balloon =
        Some(BalloonDeviceConfig { size: ByteSize::from_bytes(1 << 30), ..Default::default() });
    assert!(problem(large_balloon).contains("larger than the guest's RAM"));
}

#[test]
fn what_a_fork_must_not_inherit_is_refused() {
    let problem = |change: &dyn Fn(&mut VmConfig)| {
        let mut config = VmConfig { forkable: On, ..config("256M", 1, &[]) };
        change(&mut config);
        config.validate().err().map(|error| error.to_string())
    };
    assert_eq!(problem(&|_| {}), None);
    let served = Served { service: Metadata::new(100), address: DEFAULT_ADDRESS };
    let net = |metadata| NetConfig { metadata, .."fd=3".parse().unwrap() };
    assert_eq!(problem(&|config| config.nets = vec![net(None)]), None);
    let tokens = problem(&|config| config.nets = vec![net(None), net(Some(served.clone()))]);
    assert!(tokens.unwrap().contains("session tokens"));
    let memory = |options: &'static str| {
        problem(&move |config| config.memory = options.parse().unwrap()).unwrap()
    };
    assert!(memory("256M,backing=memfd").contains("memory in a file"));
    assert!(memory("256M,merge=owner").contains("merges its pages"));
}

#[test]
fn numa_nodes_must_add_up() {
    let two = ["size=1G,cpus=0", "size=1G,cpus=1"];
    assert_eq!(config("2G", 2, &two).validate(), Ok(()));
    let problem = |memory, cpus, numa: &[&str]| {
        config(memory, cpus, numa).validate().unwrap_err().to_string()
    };
    assert!(problem("3G", 2, &two).contains("together"));
    assert!(problem("2G", 3, &two).contains("vCPU 2 is in no node"));
    assert!(problem("2G", 1, &two).contains("names vCPU 1"));
    assert!(
        problem("2G", 2, &["size=1G,cpus=0-1", "size=1G,cpus=1"])
            .contains("in node 0 and in node 1")
    );
    assert!(
        problem("2G", 2, &["size=1G,cpus=0,distances=10", "size=1G,cpus=1"]).contains("distances")
    );
    assert!(
        problem("2G", 2, &["size=1G,cpus=0,distances=20:10", "size=1G,cpus=1"])
            .contains("distance 20")
    );
}

proptest! {
    #[test]
    fn no_text_makes_a_parser_panic(text in ".{0,60}") {
        let _ = text.parse::<MemoryConfig>();
        let _ = text.parse::<MergeOverrides>();
        let _ = text.parse::<NumaNodeConfig>();
        let _ = text.parse::<DiskConfig>();
        let _ = text.parse::<SerialConfig>();
        let _ = parse_balloon(&text);
    }
}
